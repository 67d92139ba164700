"use strict";
// Sessions, runs, checkpoints, capacity and queue of one key. Everything shown is set as text, never as HTML.

const KEY = "twinkle-key";
const API = "api/v1";
const PREFIX = document.documentElement.dataset.prefix;
const EVERY_MS = 2000;
const PAGE = 20;

const at = (id) => document.getElementById(id);
const curves = new Map(); // run id to {points, after}
const opened = new Set(); // runs whose checkpoints are shown
const cards = new Map(); // run id to its elements
let shown = PAGE;
let timer = 0;
let round = 0;

async function ask(path) {
  const response = await fetch(API + PREFIX + path, { headers: { Authorization: "Bearer " + sessionStorage.getItem(KEY) }, cache: "no-store" });
  const body = await response.json().catch(() => ({}));
  if (!response.ok) {
    const error = new Error(typeof body.detail === "string" ? body.detail : "the server answered " + response.status);
    error.status = response.status;
    throw error;
  }
  return body;
}

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// long: the columns whose text may break anywhere (identities, paths).
function rows(body, lines, long = [0]) {
  body.replaceChildren(...lines.map((cells) => {
    const row = element("tr");
    row.append(...cells.map((cell, index) => element("td", String(cell), long.includes(index) ? "long" : "")));
    return row;
  }));
}

function ago(time) {
  const seconds = Math.max(0, (Date.now() - new Date(time).getTime()) / 1000);
  if (seconds < 60) return Math.round(seconds) + " s ago";
  if (seconds < 3600) return Math.round(seconds / 60) + " min ago";
  if (seconds < 86400) return Math.round(seconds / 3600) + " h ago";
  return Math.round(seconds / 86400) + " d ago";
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
  return (unit ? bytes.toFixed(1) : bytes) + " " + units[unit];
}

function draw(card, points) {
  const drawn = points.filter((point) => typeof point.loss === "number" && Number.isFinite(point.loss));
  card.svg.toggleAttribute("hidden", drawn.length < 2);
  card.scale.hidden = drawn.length < 1;
  if (!drawn.length) { card.loss.textContent = "no loss yet"; return; }
  const last = drawn[drawn.length - 1];
  card.loss.textContent = "loss " + last.loss.toPrecision(5) + " at step " + last.step;
  const losses = drawn.map((point) => point.loss);
  const low = Math.min(...losses), high = Math.max(...losses), span = high - low || 1;
  const width = drawn.length - 1 || 1;
  card.line.setAttribute("points", drawn.map((point, index) => (100 * index / width).toFixed(2) + "," + (38 - 36 * (point.loss - low) / span).toFixed(2)).join(" "));
  card.svg.setAttribute("aria-label", "Loss from " + losses[0].toPrecision(4) + " to " + last.loss.toPrecision(4) + " over " + drawn.length + " calls");
  card.low.textContent = "lowest " + low.toPrecision(4);
  card.high.textContent = "highest " + high.toPrecision(4);
}

function makeCard(run) {
  const space = "http://www.w3.org/2000/svg";
  const card = { root: element("article", undefined, "run"), title: element("h3", run.training_run_id), about: element("p"), loss: element("p") };
  card.svg = document.createElementNS(space, "svg");
  card.svg.setAttribute("viewBox", "0 0 100 40");
  card.svg.setAttribute("preserveAspectRatio", "none");
  card.svg.setAttribute("role", "img");
  const ground = document.createElementNS(space, "line");
  for (const [name, value] of [["x1", 0], ["x2", 100], ["y1", 39], ["y2", 39]]) ground.setAttribute(name, value);
  card.line = document.createElementNS(space, "polyline");
  card.svg.append(ground, card.line);
  card.low = element("span");
  card.high = element("span");
  card.scale = element("div", undefined, "scale");
  card.scale.append(card.low, card.high);
  card.details = element("details");
  card.summary = element("summary", "Checkpoints");
  const box = element("div", undefined, "scroll");
  const table = element("table");
  const head = element("tr");
  head.append(...["Checkpoint", "Saved", "Size"].map((text) => element("th", text)));
  const top = element("thead");
  top.append(head);
  card.table = element("tbody");
  table.append(top, card.table);
  box.append(table);
  card.details.append(card.summary, box);
  card.details.addEventListener("toggle", () => {
    if (card.details.open) { opened.add(run.training_run_id); checkpoints(run.training_run_id); } else opened.delete(run.training_run_id);
  });
  card.root.append(card.title, card.about, card.loss, card.svg, card.scale, card.details);
  return card;
}

async function checkpoints(id) {
  const found = (await ask("/training_runs/" + encodeURIComponent(id) + "/checkpoints")).checkpoints;
  const card = cards.get(id);
  card.summary.textContent = "Checkpoints (" + found.length + ")";
  rows(card.table, found.map((each) => [each.twinkle_path, ago(each.time), size(each.size_bytes)]));
}

async function curve(id) {
  const known = curves.get(id) || { points: [], after: 0 };
  const body = await ask("/training_runs/" + encodeURIComponent(id) + "/curve?after=" + known.after);
  if (body.points.length) {
    known.points = known.points.concat(body.points).slice(-2000);
    known.after = body.points[body.points.length - 1].number;
  }
  curves.set(id, known);
  draw(cards.get(id), known.points);
}

async function update() {
  const [overview, page] = await Promise.all([ask("/overview"), ask("/training_runs?limit=" + shown)]);
  const capacity = overview.capacity;
  at("capacity").max = capacity.max_loras || 1;
  at("capacity").value = capacity.used_loras;
  at("capacity-text").textContent = capacity.used_loras + " of " + capacity.max_loras + " adapters in memory, " + capacity.free_loras + " free";
  rows(at("queues").tBodies[0], overview.queues.map((queue) => [queue.name, queue.running, queue.waiting, queue.waiting_own]));
  at("no-sessions").hidden = overview.sessions.length > 0;
  rows(at("sessions").tBodies[0], overview.sessions.map((session) => [
    session.session_id, session.metadata ? JSON.stringify(session.metadata) : "", ago(session.created_at), ago(session.seen_at)]), [0, 1]);
  at("sessions").hidden = !overview.sessions.length;
  const runs = page.training_runs;
  at("no-runs").hidden = runs.length > 0;
  at("more").hidden = page.cursor.total_count <= runs.length;
  for (const run of runs) {
    if (!cards.has(run.training_run_id)) cards.set(run.training_run_id, makeCard(run));
    const card = cards.get(run.training_run_id);
    const parts = [run.base_model, "rank " + run.lora_rank, run.last_request_time ? "used " + ago(run.last_request_time) : "not used yet"];
    if (run.save_dir) parts.splice(1, 0, run.save_dir);
    if (run.corrupted) parts.push("corrupted");
    card.about.textContent = parts.join(" · ");
    card.about.classList.toggle("corrupted", run.corrupted);
  }
  const order = runs.map((run) => cards.get(run.training_run_id).root);
  const present = Array.from(at("runs").children);
  if (order.length !== present.length || order.some((root, index) => root !== present[index])) at("runs").replaceChildren(...order);
  // Curves of runs that stand still are fetched once in a while only.
  const fresh = runs.filter((run) => !curves.has(run.training_run_id) || round % 15 === 0 || (run.last_request_time && Date.now() - new Date(run.last_request_time) < 120000));
  await Promise.all(fresh.map((run) => curve(run.training_run_id)));
  if (round % 5 === 0) await Promise.all(runs.filter((run) => opened.has(run.training_run_id)).map((run) => checkpoints(run.training_run_id)));
  round += 1;
}

function show(text, bad) {
  at("state").textContent = text;
  at("state").classList.toggle("bad", Boolean(bad));
}

function leave(reason) {
  clearTimeout(timer);
  sessionStorage.removeItem(KEY);
  at("content").hidden = at("forget").hidden = true;
  at("login").hidden = false;
  at("refused").hidden = !reason;
  at("refused").textContent = reason || "";
  show("Not connected");
}

async function loop() {
  clearTimeout(timer);
  if (!sessionStorage.getItem(KEY)) return;
  try {
    if (!document.hidden) {
      await update();
      at("login").hidden = true;
      at("content").hidden = at("forget").hidden = false;
      show("Connected, " + new Date().toLocaleTimeString());
    }
  } catch (error) {
    if (error.status === 401) { leave("The server does not know this key, or it has expired or been revoked."); return; }
    if (error.status === 403) { leave(error.message); return; }
    show("No answer: " + error.message, true);
  }
  timer = setTimeout(loop, EVERY_MS);
}

at("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, at("key").value.trim());
  at("key").value = "";
  at("refused").hidden = true;
  show("Connecting");
  loop();
});
at("forget").addEventListener("click", () => { leave(""); cards.clear(); curves.clear(); opened.clear(); at("runs").replaceChildren(); });
at("more").addEventListener("click", () => { shown = Math.min(shown + PAGE, 1000); loop(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) loop(); });
loop();
