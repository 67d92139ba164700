"""LazyResults among a call's arguments: from what their producers answered to the items that a worker takes.

A consumer that takes part of a result must know all its producers' lengths. Few of each: every consumer gets every producer's answer. Many: one
task reads the answers and writes each consumer its recipe, so that what is sent is linear in the number of workers.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from twinkle_remote._dispatch import Part, check_enough
from twinkle_remote._errors import DispatchError, WorkerDiedError
from twinkle_remote._failures import Failure, summarize
from twinkle_remote._lazy import slots
from twinkle_remote._ray_api import ray
from twinkle_remote._ray_messages import Header, Here, Leaf, Tree
from twinkle_remote._ray_wire import Message, read_header
from twinkle_remote._shards import Given, Stored, heard
from twinkle_remote._views import Batch, Held, Recipe


@dataclass(frozen=True, slots=True)
class Routed:
    """What one consumer takes: a recipe for each slot, and the range of items of those that are cut; total: their number, None if none is."""

    recipes: tuple[Recipe, ...]
    totals: tuple[int, ...]


def routed(header: Header, part: Part | None, answers: Sequence[Any]) -> Routed:
    """The recipes of one consumer. answers: the producers' Results."""
    recipes: list[Recipe] = []
    totals: list[int] = []
    for slot in header.slots:
        batch = _batch(slot.tree, answers, header.timeout_s)
        if slot.sliced and part is not None and (length := batch.length) is not None:
            bounds = part.bounds(length)
            recipes.append(batch.recipe(bounds.start, bounds.stop))
            totals.append(length)
        else:
            recipes.append(batch.whole())
    return Routed(tuple(recipes), tuple(totals))


def route(packed_header: bytes, parts: Sequence[Part | None], *answers: Any) -> Any:
    """The task that writes the recipes of many consumers; a Failure of a producer goes to all of them."""
    heard_answers = [heard(answer) for answer in answers]
    failed = first_failure(heard_answers)
    header = read_header(packed_header)
    written = [routed(header, part, heard_answers) if failed is None else failed for part in parts]
    return written[0] if len(written) == 1 else written


def first_failure(answers: Sequence[Any]) -> Failure | None:
    """The earliest failure among answers."""
    return min((answer for answer in answers if isinstance(answer, Failure)), key=lambda failure: failure.end_s, default=None)


@contextmanager
def filled_slots(message: Message, answers: Sequence[Any]) -> Generator[Given | None, None, None]:
    """Fetch what the slots need, for the unpacking of the arguments inside; yields what the worker was given of the batch that was cut, if any.

    Raises DispatchError for batches of different lengths, or of fewer items than there are parts, and WorkerDiedError for results that are lost.
    """
    header, part = message.header, message.part
    if not header.slots:
        yield given_of(message)
        return
    with _losses_named(header):
        plan: Routed = answers[0] if header.routed else routed(header, part, answers)
    totals = set(plan.totals)
    if part is not None and part.total is not None:
        totals.add(part.total)
    if len(totals) > 1:
        raise DispatchError(
            f"{header.method}: its lists and arrays are cut into the same parts, but they have {', '.join(map(str, sorted(totals)))} items: "
            f"make them equally long, or use dispatch='all' or a dispatch function"
        )
    if plan.totals and part is not None:
        check_enough(header.method, "a LazyResult", plan.totals[0], part.parts, "ranks", header.allow_empty)
    with _losses_named(header):
        values = [recipe.run(header.timeout_s) for recipe in plan.recipes]
    token = slots.set(values)
    try:
        yield _given(part, totals.pop()) if part is not None and totals else None
    finally:
        slots.reset(token)


def given_of(message: Message) -> Given | None:
    """What the worker was given of the batch that was cut, if any, where the driver knows its length."""
    part = message.part
    return None if part is None or part.total is None else _given(part, part.total)


@contextmanager
def _losses_named(header: Header) -> Generator[None, None, None]:
    try:
        yield
    except ray.exceptions.RayError as error:
        raise WorkerDiedError(
            f"a LazyResult among the arguments of {header.method} is lost: its worker has ended, or could not be reached within "
            f"{header.timeout_s:g} s ({summarize(error)})"
        ) from error


def _given(part: Part, total: int) -> Given:
    bounds = part.bounds(total)
    return Given(bounds.start, bounds.stop, total)


def _batch(tree: Tree, answers: Sequence[Any], timeout_s: float) -> Batch:
    if isinstance(tree, Here):
        return Held(tree.value)
    if isinstance(tree, Leaf):
        return Stored(answers[tree.first : tree.first + tree.num_results], tree.collect, tree.mesh, timeout_s)
    return tree.operation.over([_batch(inner, answers, timeout_s) for inner in tree.inner])
