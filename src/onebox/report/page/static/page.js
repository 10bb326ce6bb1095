// The page: the connection to the server, and what is drawn when a section of the state has changed.

import { LineChart } from "./charts.js";
import { Gantt, sums } from "./gantt.js";
import {
  Table, age, bitRate, clock, count, element, fillMeter, known, loss, percent, rate, seconds, setText, short, size, span,
} from "./text.js";

const SILENT_MS = 15000; // longer than the server's heartbeat
const RETRY_MS = 3000;
const HIDDEN_MS = 30000; // a page that nobody sees asks for nothing

const at = (name) => document.getElementById(name);
const state = {};

// ---- the head

const WORDS = { waiting: "starting", running: "running", ended: "ended", failed: "failed", unknown: "not known", lost: "connection lost", closed: "closed" };
let connection = "connecting"; // connecting, open, lost, closed

function drawHead() {
  const { head, run } = state;
  const over = head && (head.state === "ended" || head.state === "failed");
  const shown = connection === "lost" ? "lost" : connection === "closed" && !over ? "closed" : head ? head.state : "waiting";
  const pill = at("state");
  pill.dataset.state = shown;
  setText(at("state-word"), head || connection === "lost" || connection === "closed" ? WORDS[shown] : "connecting");
  if (!head) {
    showBanner(connection === "lost" ? "The connection to the page's server is lost; it is tried again every few seconds." : "", "lost");
    return;
  }
  setText(at("name"), head.name);
  at("name").title = head.name;
  at("trace").hidden = !head.trace;
  const part = run && run.total_steps ? run.step / run.total_steps : null;
  at("progress").hidden = part === null;
  if (part !== null) {
    at("progress").firstElementChild.style.transform = `scaleX(${Math.min(1, part)})`;
    at("progress").setAttribute("aria-valuenow", Math.round(100 * part));
    at("progress").setAttribute("aria-valuetext", `step ${run.step} of ${run.total_steps}`);
  }
  document.title = [shown === "running" ? "" : WORDS[shown], run && run.step ? `step ${count(run.step)}` : "", head.name]
    .filter(Boolean).join(" · ");
  if (connection === "lost") showBanner("The connection is lost; what is shown is from before. It is tried again every few seconds.", "lost");
  else if (connection === "closed" || over) {
    const words = over ? head.text || `the ${head.kind === "run" ? "run" : "script"} has ended` : "the page has ended; what it shows is from before";
    const later = connection === "closed" && head.folder ? `${over ? " The page has ended, too." : ""} onebox watch ${head.folder} shows the run again.` : "";
    showBanner(`${words[0].toUpperCase()}${words.slice(1)}.${later}`.replace("..", "."), over ? head.state : "lost");
  } else showBanner(head.text, "note");
  setText(at("foot"), head.folder ? `Run folder ${head.folder}` : "");
}

function showBanner(words, kind) {
  const banner = at("banner");
  banner.hidden = !words;
  banner.dataset.kind = kind;
  setText(banner, words || "");
}

// ---- numbers

const TILES = [
  ["step", "Step"], ["loss", "Loss"], ["rate", "Samples per second"], ["time", "Step time"], ["bubble", "Bubble"], ["eta", "Time left"],
  ["bound", "Bound by"], ["stale", "Gradients"], ["result", "Last test"],
];
const tiles = {};
for (const [name, title] of TILES) {
  const value = element("dd");
  const under = element("dd", { className: "small" });
  const words = ["bound", "stale", "result"].includes(name);
  if (words) value.className = "words";
  at("tiles").append(element("div", { className: words ? "tile double" : "tile" }, element("dt", {}, title), value, under));
  tiles[name] = { value, under };
}

function tile(name, value, under = "") {
  setText(tiles[name].value, value);
  setText(tiles[name].under, under);
}

function drawRun() {
  const { run } = state;
  at("numbers").hidden = !run;
  drawHead();
  if (!run) return;
  const epoch = run.epochs ? `epoch ${run.epoch} of ${run.epochs}` : run.epoch ? `epoch ${run.epoch}` : "";
  tile("step", count(run.step), [run.total_steps ? `of ${count(run.total_steps)}` : "", epoch].filter(Boolean).join(", "));
  tile("loss", loss(run.loss), "newest step");
  tile("rate", rate(run.samples_per_s), "over the last seconds");
  const measured = known(run.step_s) ? run.step_s : run.interval_s;
  const from = known(run.interval_s) && known(run.step_s) ? `one every ${seconds(run.interval_s)}` : "";
  tile("time", seconds(measured), [known(run.predicted_s) ? `predicted ${seconds(run.predicted_s)}` : "", from].filter(Boolean).join("; "));
  tile("bubble", percent(run.bubble, 1), known(run.predicted_bubble) ? `predicted ${percent(run.predicted_bubble, 1)}` : "idle part of a step");
  tile("eta", span(run.eta_s), "");
  tile("bound", run.bound || "–", [run.account, run.feed && run.feed !== run.bound ? `feed in the last epoch: ${run.feed}` : ""].filter(Boolean).join("; "));
  tile("stale", run.staleness, "");
  const { result } = run;
  const test = result ? [known(result.test_accuracy) ? `accuracy ${percent(result.test_accuracy, 1)}` : "", known(result.test_loss) ? `loss ${loss(result.test_loss)}` : ""] : [];
  tile("result", test.filter(Boolean).join(", ") || "–", result ? `after epoch ${result.epoch}` : "");
  at("islands").hidden = !run.islands.length;
  drawLast();
  if (run.islands.length) islandTable().update(run.islands);
}

let islands = null;
function islandTable() {
  islands ??= new Table(at("islands-table"), [
    { title: "island", text: (each) => String(each.number) },
    { title: "devices", text: (each) => each.devices },
    { title: "state", fill: (cell, each) => fillTag(cell, each.state) },
    { title: "age", className: "num", text: (each) => `${each.age_steps} of ${each.every_steps} steps` },
  ]);
  return islands;
}

function fillTag(cell, name) {
  if (!cell.firstChild) cell.append(element("span", { className: "tag" }));
  cell.firstChild.dataset.state = name;
  setText(cell.firstChild, name);
}

// ---- curves

const lossChart = new LineChart(at("loss-chart"), { label: "Loss by step", format: loss, axis: short });
const rateChart = new LineChart(at("rate-chart"), { label: "Samples per second by step", format: rate, axis: short, zero: true });

function onOpen(name, make) {
  at(name).addEventListener("toggle", () => make());
}

const valueTables = {};
function valueTable(name, heading, values, text) {
  const details = at(name);
  if (!details.open || !state.curves) return;
  if (!valueTables[name]) {
    const box = element("div", { className: "scroll", tabIndex: 0, role: "region", aria: { label: heading } });
    details.append(box);
    valueTables[name] = new Table(box, [
      { title: "up to step", className: "num", text: (each) => count(each[0]) }, { title: heading, className: "num", text: (each) => text(each[1]) },
    ]);
  }
  valueTables[name].update(state.curves.steps.map((step, place) => [step, values[place]]).reverse());
}

function drawTables() {
  if (!state.curves) return;
  valueTable("loss-data", "loss", state.curves.loss, loss);
  valueTable("rate-data", "samples per second", state.curves.samples_per_s, rate);
}
onOpen("loss-data", drawTables);
onOpen("rate-data", drawTables);

function drawCurves() {
  const { curves } = state;
  at("charts").hidden = !curves;
  if (!curves) return;
  const tests = curves.tests.filter((each) => known(each.test_loss))
    .map((each) => ({ step: each.step, value: each.test_loss, text: `test loss ${loss(each.test_loss)}` }));
  lossChart.update(curves.steps, curves.loss, tests);
  rateChart.update(curves.steps, curves.samples_per_s);
  setText(at("loss-note"), [tests.length ? "circles: on the test set" : "", lossChart.logarithmic ? "logarithmic" : ""].filter(Boolean).join("; "));
  setText(at("rate-note"), "samples per second");
  drawTables();
}

// ---- schedule and plan

const gantt = new Gantt(at("gantt"), {
  onRead: (words) => setText(at("gantt-read"), words || HINT),
  onHold: (held) => { setText(at("zoom-all"), held ? "Newest step" : "Whole step"); scheduleNote(); },
});
const HINT = "Drag over a range to zoom; after a click the wheel zooms, and + − ← → 0 do the same";
at("zoom-in").addEventListener("click", () => gantt.zoom(0.6));
at("zoom-out").addEventListener("click", () => gantt.zoom(1.67));
at("zoom-all").addEventListener("click", () => gantt.whole());
setText(at("gantt-read"), HINT);

let legendOf = "";
let timesTable = null;

function ofIsland() {
  return state.run?.islands.length ? " of island 0" : "";
}

function scheduleNote() {
  const shown = gantt.data;
  if (!shown) return;
  setText(at("schedule-note"), [
    `step ${count(shown.step)}${ofIsland()}, ${seconds(shown.length_us / 1e6)}`,
    shown.aligned ? "each host begins with its own first span, as their clocks differ" : "",
    shown.left_out ? `${count(shown.left_out)} short spans are left out` : "",
  ].filter(Boolean).join("; "));
  gantt.canvas.dataset.step = shown.step;
}

function drawSchedule() {
  const { schedule } = state;
  at("schedule").hidden = !schedule;
  drawPlans();
  if (!schedule) return;
  gantt.update(schedule);
  const used = schedule.kinds.filter((_, kind) => schedule.spans.some((each) => each[1] === kind));
  if (legendOf !== used.join()) {
    legendOf = used.join();
    at("legend").replaceChildren(...used.map((kind) => {
      const swatch = element("span", { className: "swatch", aria: { hidden: "true" } });
      swatch.style.background = `var(${{ forward: "--forward", backward: "--backward", "input gradient": "--input", "weight gradient": "--weight", update: "--update", wait: "--wait", transfer: "--transfer" }[kind] || "--other"})`;
      return element("li", {}, swatch, kind);
    }));
  }
  scheduleNote();
  drawTimes();
}

function drawTimes() {
  const { schedule } = state;
  if (!at("gantt-data").open || !schedule) return;
  if (!timesTable) {
    const box = element("div", { className: "scroll", tabIndex: 0, role: "region", aria: { label: "Times of each device" } });
    at("gantt-data").append(box);
    timesTable = new Table(box, [
      { title: "device", text: (each) => each.process },
      ...schedule.kinds.map((kind, place) => ({ title: kind, className: "num", text: (each) => (each.times[place] ? seconds(each.times[place] / 1e6) : "–") })),
    ]);
  }
  timesTable.update(sums(schedule));
}
onOpen("gantt-data", drawTimes);

let stages = null;

function drawPlan() {
  const { plan } = state;
  at("plan").hidden = !plan;
  drawPlans();
  if (!plan) return;
  setText(at("plan-text"), plan.text);
  setText(at("plan-note"), (plan.schedule === "one stage" ? "" : `schedule ${plan.schedule}`) + ofIsland());
  stages ??= new Table(at("plan-table"), [
    { title: "stage", text: (each) => String(each.stage) },
    { title: "device", text: (each) => each.devices + (each.share < 1 ? ` (${percent(each.share)})` : "") },
    { title: "part of the model", fill: fillPart },
    { title: "time of a micro-batch", fill: fillTimes },
  ]);
  stages.update(plan.stages);
}

function fillPart(cell, stage) {
  setText(cell, [stage.segments, stage.settings].filter(Boolean).join("; "));
}

function fillTimes(cell, stage) {
  const words = stage.times.map((each) => {
    const measured = known(each.measured_s) ? seconds(each.measured_s) : "";
    const predicted = known(each.predicted_s) ? `predicted ${seconds(each.predicted_s)}` : "";
    return [each.kind, measured, measured && predicted ? `(${predicted})` : predicted];
  });
  const key = JSON.stringify(words);
  if (cell.dataset.key === key) return;
  cell.dataset.key = key;
  cell.className = "compare";
  cell.replaceChildren(...words.map(([kind, measured, predicted]) =>
    element("div", {}, `${kind} `, element("b", {}, measured), measured && predicted ? " " : "", element("span", {}, predicted))));
  if (!words.length) cell.textContent = "–";
}

function drawPlans() {
  const both = [at("schedule"), at("plan")];
  at("plans").hidden = both.every((each) => each.hidden);
  both.forEach((each, place) => each.classList.toggle("alone", !each.hidden && both[1 - place].hidden));
}

// ---- pool

const hostParts = [];

function deviceColumns(kind) {
  const columns = [
    { title: "device", className: "c-device", text: (each) => (known(each.number) ? `${each.number}: ${each.device}` : each.device) + (each.emulated ? "*" : "") },
    { title: "name", className: "minor", text: (each) => `${each.name}${each.threads ? `, ${each.threads} core${each.threads > 1 ? "s" : ""}` : ""}` },
    { title: "state", className: "c-state", fill: (cell, each) => fillTag(cell, each.state === "unknown" ? "recorded" : each.state) },
    { title: kind === "agents" ? "leased memory" : "memory of the budget", className: "c-memory", fill: fillMemory },
    { title: "busy", className: "c-busy", fill: (cell, each) => fillMeter(cell, { value: each.busy, text: percent(each.busy), label: "busy", kind: "busy" }) },
    { title: "temp.", className: "num minor c-temp", text: (each) => (known(each.temperature_c) ? `${each.temperature_c.toFixed(0)} °C` : "–") },
  ];
  if (kind === "agents") {
    columns.splice(4, 0, { title: "free cores", className: "num minor c-cores", text: (each) => (known(each.free_threads) ? `${each.free_threads} of ${each.threads}` : "–") });
    columns.push({ title: "leased by", text: holders });
  }
  return columns;
}

function fillMemory(cell, device) {
  const budget = device.budget_bytes || device.memory_bytes;
  const used = device.used_bytes;
  const shown = known(used) ? used : device.peak_bytes;
  fillMeter(cell, {
    value: known(used) && budget ? used / budget : null,
    peak: known(device.peak_bytes) && budget ? device.peak_bytes / budget : null,
    text: known(shown) ? `${size(shown)} of ${size(budget)}${known(used) ? "" : " at most"}` : size(budget),
    label: "memory",
  });
}

function holders(device) {
  return device.holders.map((each) => {
    const silent = each.silent_s > 3 ? `, silent for ${age(each.silent_s)}` : "";
    return `${each.client} (${size(each.memory_bytes)}, ${age(each.since_s)}${silent})`;
  }).join("; ") || "–";
}

function drawPool() {
  const hosts = state.hosts || [];
  const kind = state.head?.kind;
  at("pool").hidden = !hosts.length;
  while (hostParts.length > hosts.length) hostParts.pop().box.remove();
  hosts.forEach((host, place) => {
    if (place === hostParts.length) {
      const title = element("h3");
      const note = element("p", { className: "note" });
      const problem = element("p", { className: "problem", hidden: true });
      const box = element("div", { className: "host" }, element("div", { className: "host-head" }, title, note), problem);
      at("hosts").append(box);
      hostParts.push({ title, note, problem, box, table: new Table(box, deviceColumns(kind)) });
    }
    const part = hostParts[place];
    setText(part.title, host.name);
    setText(part.note, [
      known(host.load) ? `load ${host.load.toFixed(2)} a core` : "",
      host.waiting.length ? `waiting: ${host.waiting.join(", ")}` : "",
    ].filter(Boolean).join("; "));
    part.problem.hidden = !host.problem;
    setText(part.problem, host.problem);
    part.table.table.hidden = !host.devices.length;
    part.table.update(host.devices);
  });
  const devices = hosts.flatMap((host) => host.devices);
  const away = devices.filter((each) => each.state === "gone" || each.state === "lost").length;
  setText(at("pool-note"), [
    `${devices.length} device${devices.length === 1 ? "" : "s"} on ${hosts.length} host${hosts.length === 1 ? "" : "s"}`,
    away ? `${away} lost` : "", devices.some((each) => each.emulated) ? "* emulated" : "",
  ].filter(Boolean).join("; "));
}

// ---- the time of a script

let timeParts = null;
let timeLines = null;

function fillShare(cell, each) {
  fillMeter(cell, { value: each.share, text: percent(each.share), label: "share of the time", kind: "busy" });
}

function drawScript() {
  const { script } = state;
  at("script").hidden = !script;
  if (!script) return;
  setText(at("script-note"), "since the first use of a device");
  setText(at("script-bound"), script.bound);
  timeParts ??= new Table(at("script-parts"), [
    { title: "part", text: (each) => each.name },
    { title: "share", className: "c-busy", fill: fillShare },
  ]);
  timeLines ??= new Table(at("script-lines"), [
    { title: "line that waits", text: (each) => each.place },
    { title: "text", className: "minor", text: (each) => each.text },
    { title: "waits", className: "num minor", text: (each) => count(each.waits) },
    { title: "share", className: "c-busy", fill: fillShare },
  ]);
  timeParts.update(script.parts);
  at("script-lines").hidden = !script.lines.length;
  timeLines.update(script.lines);
}

let links = null;

function drawLinks() {
  const found = state.links || [];
  at("links").hidden = !found.length;
  drawLast();
  if (!found.length) return;
  links ??= new Table(at("links-table"), [
    { title: "link", text: (each) => `${each.source} → ${each.target}` },
    { title: "measured", className: "num", text: (each) => bitRate(each.measured_bps) },
    { title: "now", className: "num", text: (each) => bitRate(each.now_bps) },
    { title: "bytes", className: "num", text: (each) => (known(each.step_bytes) ? `${size(each.step_bytes)} a step` : `${size(each.total_bytes)} so far`) },
  ]);
  links.update(found);
}

function drawLast() {
  at("events").classList.toggle("alone", at("links").hidden && at("islands").hidden);
}

// ---- events

function drawEvents() {
  const events = state.events || [];
  at("events").hidden = !events.length;
  setText(at("events-note"), "the newest first");
  const list = at("events-list");
  const keys = events.map((each) => JSON.stringify(each)).reverse();
  const old = [...list.children];
  const kept = new Map(old.map((item) => [item.dataset.key, item]));
  const wanted = new Set(keys);
  old.forEach((item) => wanted.has(item.dataset.key) || item.remove());
  let before = list.firstChild;
  [...events].reverse().forEach((event, place) => {
    const key = keys[place];
    if (before && before.dataset.key === key) {
      before = before.nextSibling;
      return;
    }
    const item = kept.get(key) || eventItem(event, key);
    list.insertBefore(item, before);
  });
}

function eventItem(event, key) {
  const when = [clock(event.at_s), known(event.step) && !known(event.at_s) ? `step ${count(event.step)}` : ""].filter(Boolean).join(" ");
  return element("li", { data: { key } },
    element("span", { className: "at", title: known(event.at_s) ? new Date(event.at_s * 1000).toLocaleString() : "" }, when),
    element("span", { className: "tag", data: { severity: event.severity } }, event.kind),
    element("span", { className: "what" }, event.text));
}

// ---- the connection

const DRAW = {
  head: () => { drawHead(); drawPool(); }, run: drawRun, curves: drawCurves, script: drawScript, hosts: drawPool, links: drawLinks, plan: drawPlan,
  schedule: drawSchedule, events: drawEvents,
};

let source = null;
let heard = 0;
let retry = 0;
let hidden = 0;

function take(message) {
  heard = Date.now();
  if (connection !== "open") {
    connection = "open";
    drawHead();
  }
  if (!message.data) return;
  const sections = JSON.parse(message.data);
  Object.assign(state, sections);
  for (const name of Object.keys(sections)) DRAW[name]?.();
  document.body.dataset.number = message.lastEventId;
}

function lose() {
  if (connection === "closed") return;
  connection = "lost";
  drawHead();
}

function close() {
  source?.close();
  source = null;
  clearTimeout(retry);
}

function connect() {
  close();
  heard = Date.now();
  const made = new EventSource("events");
  source = made;
  made.addEventListener("message", take);
  made.addEventListener("beat", take);
  made.addEventListener("end", () => {
    connection = "closed";
    close();
    drawHead();
  });
  made.addEventListener("error", () => {
    lose();
    if (made.readyState === EventSource.CLOSED && source === made) { // refused, which a browser does not try again
      clearTimeout(retry);
      retry = setTimeout(connect, RETRY_MS);
    }
  });
}

setInterval(() => {
  if (source && Date.now() - heard > SILENT_MS) {
    lose();
    connect();
  }
}, RETRY_MS);

document.addEventListener("visibilitychange", () => {
  clearTimeout(hidden);
  if (document.hidden) hidden = setTimeout(close, HIDDEN_MS);
  else if (!source && connection !== "closed") connect();
});

connect();
