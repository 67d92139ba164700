"""The web page, what it shows beside the rest of the interface, and the metrics."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.resources import files
from typing import Annotated, Literal

from fastapi import APIRouter, FastAPI, Path, Query, Request, Response

from twinkle_client import types as wire

from ._errors import Forbidden
from ._metrics import CONTENT_TYPE
from .http._auth import Caller, get_service
from .http._json import StrictRoute
from .store import Session

# Everything comes from this server, nothing is inline, nobody frames it.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
}
_TYPES = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}

overview_router = APIRouter(route_class=StrictRoute, tags=["page"])
page_router = APIRouter(tags=["page"])


@overview_router.get("/overview")
async def overview(request: Request, caller: Caller) -> wire.Overview:
    """The caller's live sessions, queues and capacity: what the web page shows beside runs and checkpoints."""
    service = get_service(request)
    largest, used = service.capacity
    sessions, _ = await service.io(lambda: service.store.page(Session, tenant=caller.tenant, limit=50, where={"ended_at": None}))
    queues = [
        wire.QueueInfo(name=name, running=len(queue.running), waiting=queue.length, waiting_own=queue.lengths().get(caller.tenant, 0))
        for name, queue in service.calls.queues.items()
    ]
    return wire.Overview(
        sessions=[
            wire.SessionInfo(
                session_id=each.id,
                metadata=each.metadata or None,
                created_at=_time(each.created_at),
                seen_at=_time(service.sessions.seen_at(each.id) or each.seen_at),
            )
            for each in sessions
        ],
        queues=queues,
        capacity=wire.CapacityInfo(max_loras=largest, used_loras=used, free_loras=largest - used),
    )


@overview_router.get("/training_runs/{run_id}/curve")
async def curve(
    request: Request,
    caller: Caller,
    run_id: Annotated[str, Path(max_length=128)],
    after: Annotated[int, Query(ge=0, lt=1 << 62, description="The number of the last point that is known")] = 0,
) -> wire.Curve:
    """What calls on a run measured, oldest first: at most 1000 points behind the number `after`."""
    service = get_service(request)

    def read() -> wire.Curve:
        run = service.runs.visible(caller, run_id)
        points = service.store.metrics(run.id, limit=1000, after=after)
        return wire.Curve(
            points=[
                wire.CurvePoint(
                    number=each["number"], step=each["step"], time=_time(each["at"]), loss=each["measured"].get("loss"), measured=each["measured"]
                )
                for each in points
            ]
        )

    return await service.io(read)


@page_router.get("/", include_in_schema=False)
async def page(request: Request) -> Response:
    """The web page. It asks for a key itself; without one it shows nothing."""
    return _file("index.html", prefix=get_service(request).config.route_prefix)


@page_router.get("/page/{name}", include_in_schema=False)
async def page_file(name: Literal["app.js", "style.css"]) -> Response:
    """The page's script and style."""
    return _file(name)


@page_router.get("/metrics", include_in_schema=False)
async def metrics(request: Request, caller: Caller) -> Response:
    """For Prometheus; needs a key with the scope 'admin', since it tells of all tenants."""
    if not caller.is_admin:
        raise Forbidden("/metrics needs a key with the scope 'admin'")
    service = get_service(request)
    return Response(await service.io(service.metrics.text, service), media_type=CONTENT_TYPE)


def include_dashboard(app: FastAPI, prefix: str) -> None:
    """Adds the routes: what the page asks for under `prefix`, the page itself at the root."""
    app.include_router(overview_router, prefix=prefix)
    app.include_router(page_router)


def _file(name: str, prefix: str | None = None) -> Response:
    content = files("twinkle_server").joinpath("_page", name).read_text(encoding="utf-8")
    if prefix is not None:  # letters, digits, '/', '_' and '-', says the configuration
        content = content.replace('data-prefix="/twinkle"', f'data-prefix="{prefix}"')
    return Response(content, headers={**_HEADERS, "Content-Type": _TYPES[name.rpartition(".")[2]]})


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
