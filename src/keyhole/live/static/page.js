// The live page. It keeps no state of its own but what is selected (in the address): everything shown is what the
// server last sent, so that a reload, another tab and this one agree. All text goes through textContent.

const $ = (id) => document.getElementById(id);
const KINDS = { certified: "good", running: "live", stopping: "live", stopped: "", new: "", done: "bad", failed: "bad", unreadable: "bad" };
const MOST_COMPARED = 6;
const FEW_PICTURES = 4;   // more of them are a grid, one of them large
let source = null;        // the stream of events
let selected = null;      // id of the run that is shown
let comparing = null;     // ids while some are compared
let list = [];            // runs, as the server lists them
let run = null;           // the run shown
let drawn = { version: -1, pictures: [] };
let families = [];
let ended = false;        // the server said that it ends
let said = "";            // what was announced last

// --- small helpers -------------------------------------------------------------------------------------------------

function make(tag, given = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (name === "class") node.className = value;
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}
const SVG = "http://www.w3.org/2000/svg";
function draw(tag, given = {}, text = null) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(given)) node.setAttribute(name, value);
  if (text !== null) node.textContent = text;
  return node;
}
function show(node, visible) { node.hidden = !visible; }
function say(id, text) { const node = $(id); if (node.textContent !== text) node.textContent = text; }
const whole = (number) => (number === null || number === undefined ? "–" : Math.round(number).toLocaleString("en"));
function figure(number, digits = 2) {
  if (number === null || number === undefined || Number.isNaN(number)) return "–";
  if (number === 0) return "0";
  const size = Math.abs(number);
  if (size >= 1e-3 && size < 1e5) return String(Number(number.toPrecision(digits))).replace("-", "−");
  const [front, exponent] = number.toExponential(digits - 1).split("e");
  return `${front.replace("-", "−")} × ${powerOfTen(Number(exponent))}`;
}
function powerOfTen(exponent) { return `10${[...String(exponent)].map((mark) => (mark === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[mark])).join("")}`; }
function middle(numbers) {
  const sorted = [...numbers].sort((one, other) => one - other), at = Math.floor(sorted.length / 2);
  return sorted.length % 2 ? sorted[at] : (sorted[at - 1] + sorted[at]) / 2;
}
function typicalError(ending) {  // of fresh answers, over their size: `typical_error` of keyhole.recovery
  const told = ending?.heldout;
  if (!told?.answers.length || ending.result.worst_error === null) return null;
  const sizes = told.answers.map(Math.abs), usual = middle(sizes);
  return middle(told.answers.map((answer, n) => (answer === told.predictions[n] ? 0 : Math.abs(answer - told.predictions[n]) / Math.max(sizes[n], usual))));
}
function seconds(number) {
  if (number < 10) return `${number.toFixed(1)} s`;
  if (number < 120) return `${Math.round(number)} s`;
  return `${Math.floor(number / 60)} min ${Math.round(number % 60)} s`;
}
function stateOf(one) {
  if (one.state === "done") return one.outcome === "CERTIFIED" ? ["certified", "good"] : [words(one.outcome), "bad"];
  return [one.state, KINDS[one.state] ?? ""];
}
const words = (name) => String(name).toLowerCase().replaceAll("_", " ");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

async function ask(path, body) {
  const options = body === undefined ? {} : { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  let reply;
  try { reply = await fetch(path, options); } catch { return { ok: false, data: { error: "the server does not answer: is it still running?" } }; }
  let data = {};
  try { data = await reply.json(); } catch { /* said below */ }
  if (!reply.ok && !data.error) data = { error: `the server answered ${reply.status}` };
  return { ok: reply.ok, data };
}

// --- events --------------------------------------------------------------------------------------------------------

function connect() {
  if (source) source.close();
  source = new EventSource(`/api/events?run=${encodeURIComponent(selected ?? "")}`);
  source.addEventListener("open", () => connection("live", "live"));
  source.addEventListener("error", () => { if (!ended) connection("waiting", "connection lost, trying again"); });
  source.addEventListener("runs", (event) => { list = JSON.parse(event.data).runs; showList(); if (comparing) showCompare(); });
  source.addEventListener("run", (event) => { run = JSON.parse(event.data); if (run.id === selected) showRun(); });
  source.addEventListener("missing", () => {  // a run of another server, perhaps from an old address
    selected = null;
    history.replaceState(null, "", location.pathname);
    if (list.length) route();
  });
  source.addEventListener("pictures", (event) => { drawn = JSON.parse(event.data); showPictures(); });
  source.addEventListener("end", () => {
    ended = true;
    source.close();
    connection("ended", "the server has ended");
    for (const button of document.querySelectorAll("main button, form button")) button.disabled = true;
  });
}
function connection(state, text) { $("connection").dataset.state = state; say("connection", text); }

function goTo(hash) { if (location.hash !== hash) location.hash = hash; else route(); }
function route() {
  const [, kind, rest] = /^#(run|compare)=(.*)$/.exec(location.hash) ?? [null, null, ""];
  const before = selected;
  comparing = null;
  if (kind === "compare") comparing = decodeURIComponent(rest).split(",").filter(Boolean);
  else if (kind === "run") selected = decodeURIComponent(rest);
  if (selected === null && list.length) selected = list[0].id;
  if (selected !== before || !source) { run = null; drawn = { version: -1, pictures: [] }; said = ""; connect(); }
  showList();
  showView();
}
function showView() {
  const known = run && run.id === selected;
  show($("compare"), comparing !== null);
  show($("run"), comparing === null && Boolean(known));
  show($("empty"), comparing === null && !known);
  if (comparing) showCompare(); else if (known) showRun();
}

// --- the list of runs ----------------------------------------------------------------------------------------------

function listed() {
  const sought = $("filter").value.trim().toLowerCase();
  return list.filter((one) => [one.id, one.label, one.note, ...one.tags].some((text) => text.toLowerCase().includes(sought)));
}
function showList() {
  if (selected === null && list.length && !comparing) { route(); return; }
  show($("no-runs"), !list.length);
  show($("to-compare"), list.length > 1);
  const old = new Map([...$("runs").children].map((item) => [item.dataset.id, item]));
  show($("filter"), list.length > 3 || $("filter").value !== "");
  listed().forEach((one, place) => {
    let item = old.get(one.id);
    if (!item) {
      const button = make("button", { type: "button" }, make("span", { class: "dot" }), make("span"), make("small"));
      button.addEventListener("click", () => goTo(`#run=${encodeURIComponent(one.id)}`));
      item = make("li", {}, button);
      item.dataset.id = one.id;
    }
    old.delete(one.id);
    const button = item.firstElementChild, [state, tone] = stateOf(one);
    button.dataset.tone = tone;
    button.children[1].textContent = one.id;
    button.children[2].textContent = [state, one.label, ...one.tags.map((tag) => `#${tag}`)].join(" · ");
    if (one.id === selected && !comparing) button.setAttribute("aria-current", "true"); else button.removeAttribute("aria-current");
    if ($("runs").children[place] !== item) $("runs").insertBefore(item, $("runs").children[place] ?? null);
  });
  for (const item of old.values()) item.remove();
}

// --- one run -------------------------------------------------------------------------------------------------------

function showRun() {
  if (comparing) return;
  show($("empty"), false);
  show($("run"), true);
  const now = run.progress, [state, tone] = stateOf(run), active = run.state === "running" || run.state === "stopping";
  say("run-state", state);
  $("run-state").dataset.tone = tone;
  say("run-id", run.id);
  say("run-title", run.label === run.target ? run.label : run.label.charAt(0).toUpperCase() + run.label.slice(1));
  say("run-target", run.target);
  show($("run-target"), run.label !== run.target);
  document.title = `${state} · ${run.id} · Keyhole`;
  showRemarks();
  showOutcome(tone);
  showActions(active);
  showTiles(now, active);
  showStages(now, active);
  showCurve(now);
  showHeldout();
  showQuestions(now, active);
  say("command", run.command);
  showFiles();
  showAttention();
  const words = run.state === "running" ? `running, stage ${now.stage || "starting"}` : state;
  if (words !== said) { said = words; say("announce", `${run.id}: ${words}`); }
}

function showRemarks() {
  const key = JSON.stringify([run.id, run.tags, run.note]);
  if ($("remarks").dataset.key === key) return;  // what is being written stays
  $("remarks").dataset.key = key;
  $("tags").replaceChildren(...run.tags.map((tag) => make("span", { class: "chip" }, tag)));
  say("note", run.note);
  show($("note"), run.note !== "");
  $("new-tags").value = run.tags.join(", ");
  $("new-note").value = run.note;
  for (const id of ["remarks-said", "error-tags", "error-note"]) say(id, "");
}

function showOutcome(tone) {
  const ending = run.ending?.result;
  show($("outcome"), Boolean(ending || run.message));
  $("outcome").dataset.tone = tone;
  say("outcome-name", ending ? `${words(ending.outcome).replace(/^./, (first) => first.toUpperCase())}:` : "No result:");
  const apart = run.ending?.distance;
  const truth = apart === null || apart === undefined ? "" : `; relative distance ${figure(apart)} from the parameters in the box`;
  say("outcome-message", (ending ? ending.message + truth : run.message) + ".");
  say("outcome-remedy", ending?.remedy ?? "");
}

function showActions(active) {
  const mayResume = !active && run.why_not_resumable === "";
  const stopped = document.activeElement === $("stop") && !active, resumed = document.activeElement === $("resume") && active;
  show($("stop"), active);
  $("stop").setAttribute("aria-disabled", String(run.state !== "running"));  // one that is disabled would lose the focus
  say("stop", run.state === "stopping" ? "Stopping…" : "Stop");
  show($("resume"), mayResume);
  show($("resume-budget"), mayResume && run.least_budget !== null);
  if (run.least_budget !== null && !$("new-budget").value) $("new-budget").value = String(2 * run.least_budget);
  say("action-note", mayResume ? `${whole(run.progress.queries)} answers are kept: none is asked again` : active || run.state === "done" ? "" : run.why_not_resumable);
  if (stopped && mayResume) $("resume").focus();
  if (resumed) $("stop").focus();
}

function showTiles(now, active) {
  const result = run.ending?.result;
  say("t-queries", whole(result ? result.queries : now.queries));
  say("t-queries-note", result ? (result.counting_bound ? `${whole(result.counting_bound)} is the fewest possible` : "") : `of ${whole(now.planned)} planned so far`);
  say("t-rate", whole(now.rate));
  say("t-rate-note", active ? "in the last seconds" : "on the whole");
  say("t-journal", whole(now.journal));
  say("t-journal-note", `${whole(now.new)} asked now`);
  say("t-left", now.left === null ? "no limit" : whole(now.left));
  say("t-left-note", now.budget === null ? "" : `of ${whole(now.budget)}`);
  say("t-error-name", result ? "Held-out error" : "Error so far");
  say("t-error", result ? figure(typicalError(run.ending)) : now.error === null ? "–" : `± ${figure(now.error, 1)}`);
  say("t-error-note", result ? "of half the fresh answers, over their size" : now.error === null ? "the method does not tell yet" : "of what was read, relative");
  say("t-time", seconds(now.seconds));
  say("t-time-note", run.attempts > 1 ? `attempt ${run.attempts}` : "");
}

function showStages(now, active) {
  const box = $("stages");
  while (box.children.length > now.stages.length) box.lastElementChild.remove();
  now.stages.forEach((stage, place) => {
    let item = box.children[place];
    if (!item) {
      item = make("li", {}, make("span", { class: "name" }), make("span", { class: "count" }),
        make("span", { class: "meter" }, make("i", { class: "journal" }), make("i")));
      box.append(item);
    }
    const done = stage.new + stage.journal, [name, count, meter] = item.children;
    item.classList.toggle("again", place > 0 && stage.attempt !== now.stages[place - 1].attempt);
    name.textContent = stage.name;
    count.textContent = done < stage.planned ? `${whole(done)} of ${whole(stage.planned)}` : whole(done);
    meter.children[0].style.width = `${(100 * stage.journal) / Math.max(1, stage.planned)}%`;
    meter.children[1].style.width = `${(100 * stage.new) / Math.max(1, stage.planned)}%`;
    if (active && stage.name === now.stage && stage.attempt === now.attempt) item.setAttribute("aria-current", "step"); else item.removeAttribute("aria-current");
  });
  say("no-stages", now.stages.length ? "" : active ? "About to ask." : "Nothing was asked since this server began.");
}

function showCurve(now) {
  const width = 420, height = 150, left = 46, bottom = 20, points = [...now.points, [now.seconds, now.new, now.journal]];
  const end = Math.max(now.seconds, 0.1), most = Math.max(1, now.new + now.journal);
  const x = (at) => left + ((width - left) * at) / end, y = (count) => (height - bottom) * (1 - count / most) + 4;
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height + 6}`, role: "img",
    "aria-label": `${whole(most)} answers in ${seconds(now.seconds)}, ${whole(now.journal)} of them from the journal` });
  for (const part of [0, 0.5, 1]) {
    svg.append(draw("line", { class: "grid", x1: left, x2: width, y1: y(most * part), y2: y(most * part) }));
    svg.append(draw("text", { x: left - 6, y: y(most * part) + 4, "text-anchor": "end" }, whole(most * part)));
  }
  svg.append(draw("text", { x: left, y: height + 4 }, "0 s"), draw("text", { x: width, y: height + 4, "text-anchor": "end" }, seconds(now.seconds)));
  const top = points.map(([at, fresh, old]) => `${x(at)},${y(fresh + old)}`), low = points.map(([at, , old]) => `${x(at)},${y(old)}`);
  const base = [`${x(points.at(-1)[0])},${y(0)}`, `${x(0)},${y(0)}`];
  svg.append(draw("polygon", { class: "new-area", points: [...top, ...base].join(" ") }));
  if (now.journal) svg.append(draw("polygon", { class: "old-area", points: [...low, ...base].join(" ") }));
  svg.append(draw("polyline", { class: "new", points: top.join(" ") }));
  $("curve").replaceChildren(svg);
}

function overBar(ratio) {
  return ratio <= 1 ? `, the worst error ${figure(100 * ratio)} % of its error bar` : `, the worst error ${figure(ratio)} × its error bar`;
}
function showHeldout() {
  const told = run.ending?.heldout, result = run.ending?.result;
  const errors = told ? told.answers.map((answer, n) => Math.abs(answer - told.predictions[n])) : run.progress.heldout;
  if (!errors.length) {
    say("heldout-note", result ? "No fresh question was asked." : "The certificate comes last: fresh questions, whose answers must be predicted within their error bars.");
    $("heldout").replaceChildren();
    return;
  }
  const typical = typicalError(run.ending), share = result && result.worst_ratio !== null ? overBar(result.worst_ratio) : "";
  const size = typical === null ? `, largest error ${figure(Math.max(...errors))}` : `, half of them ${typical === 0 ? "predicted exactly" : `predicted to ${figure(typical)} of their size`}`;
  const stated = result?.certified && result.statement ? ` ${result.statement}.` : "";
  say("heldout-note", `${whole(errors.length)} fresh answers${result ? "" : " so far"}${size}${share}.${stated}`);
  const seen = errors.filter((error) => error > 0), high = Math.ceil(Math.log10(Math.max(...seen, 1e-300))), low = Math.min(high - 1, Math.floor(Math.log10(Math.min(...seen, 1e300))));
  const width = 420, height = 130, left = 46, step = (width - left) / errors.length;
  const y = (error) => (error > 0 && seen.length ? 6 + ((high - Math.log10(error)) / (high - low)) * (height - 12) : height);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height + 22}`, role: "img",
    "aria-label": `Errors of ${errors.length} fresh answers, the largest ${figure(Math.max(...errors))}, the least ${figure(Math.min(...errors))}` });
  if (seen.length) for (const power of [high, low]) {
    svg.append(draw("line", { class: "grid", x1: left, x2: width, y1: y(10 ** power), y2: y(10 ** power) }));
    svg.append(draw("text", { x: left - 6, y: y(10 ** power) + 4, "text-anchor": "end" }, powerOfTen(power)));
  }
  errors.forEach((error, n) => svg.append(draw("circle", { class: "mark", cx: left + step * (n + 0.5), cy: y(error), r: Math.max(1.5, Math.min(4, step / 2.6)) })));
  svg.append(draw("text", { x: left, y: height + 18 }, "error of each fresh answer, exact ones at the foot"));
  $("heldout").replaceChildren(svg);
}

function showFiles() {
  const names = run.files.join();
  if ($("files").dataset.names === `${run.id} ${names}`) return;
  $("files").dataset.names = `${run.id} ${names}`;
  $("files").replaceChildren(...run.files.map((name) => make("a", { href: `/api/runs/${encodeURIComponent(run.id)}/files/${encodeURIComponent(name)}` }, name)));
}

// --- matrices ------------------------------------------------------------------------------------------------------

function rgb(hex) { return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)); }
function palette() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const [minus, zero, plus] = (dark ? ["#5aa9ff", "#1a1f28", "#ffb454"] : ["#1f4f9c", "#fdfcf7", "#b2401c"]).map(rgb);
  return (byte) => {  // signed, −127 to 127
    const part = Math.abs(byte / 127) ** 0.75, end = byte < 0 ? minus : plus;
    return zero.map((from, n) => Math.round(from + (end[n] - from) * part));
  };
}
function bytes(text) { return Int8Array.from(atob(text), (mark) => mark.charCodeAt(0)); }
function paint(canvas, rows, columns, cells) {
  const colour = palette(), table = new Map();
  canvas.width = columns;
  canvas.height = rows;
  const image = new ImageData(Math.max(1, columns), Math.max(1, rows));
  cells.forEach((byte, n) => {
    if (!table.has(byte)) table.set(byte, colour(byte));
    image.data.set([...table.get(byte), 255], 4 * n);
  });
  canvas.getContext("2d").putImageData(image, 0, 0);
}
function canvasOf(picture, largest = picture.largest) {
  const [rows, columns] = picture.shape, canvas = make("canvas", { role: "img" });
  canvas.setAttribute("aria-label", `${picture.name}, ${rows} by ${columns}, entries up to ${figure(picture.largest)} in size`);
  const part = largest > 0 ? picture.largest / largest : 1;
  paint(canvas, ...picture.cells, bytes(picture.data).map((byte) => Math.round(byte * part)));
  return canvas;
}
function scaleOf(largest) {
  const ramp = make("canvas", { "aria-hidden": "true" });
  paint(ramp, 1, 255, Int8Array.from({ length: 255 }, (_, n) => n - 127));
  return make("div", { class: "scale" }, `−${figure(largest)}`, ramp, `+${figure(largest)}`);
}
function pictureOf(picture) {
  const [rows, columns] = picture.shape, pooled = picture.cells[0] !== rows || picture.cells[1] !== columns;
  return make("figure", {}, canvasOf(picture),
    make("figcaption", {}, `${picture.name}, ${rows} × ${columns}${pooled ? "; a square shows the largest of several entries" : ""}`, scaleOf(picture.largest)));
}
function gridOf(all) {  // one colour scale for all, so that a quiet head looks quiet
  const largest = Math.max(...all.map((picture) => picture.largest));
  const choose = (picture, place) => {
    const button = make("button", { type: "button", class: "small" }, canvasOf(picture, largest), make("small", {}, picture.name));
    button.setAttribute("aria-pressed", String(place === large));
    button.addEventListener("click", () => { large = place; showPictures(); $("pictures").querySelectorAll("button.small")[place].focus(); });
    return button;
  };
  return [make("div", { class: "grid" }, ...all.map(choose)), scaleOf(largest)];
}
let large = 0;  // which picture of the grid is shown large
function showPictures() {
  const all = drawn.pictures, many = all.length > FEW_PICTURES;
  const again = document.activeElement?.matches("button.small");  // a new state must not lose the focus
  if (large >= all.length) large = 0;
  $("pictures").replaceChildren(...(many ? [...gridOf(all), pictureOf(all[large])] : all.map((each) => pictureOf(each))));
  if (many && again) $("pictures").querySelectorAll("button.small")[large].focus();
  $("pictures").classList.toggle("alone", all.length === 1);
  $("pictures").classList.toggle("many", many);
  if (run && run.id === selected) showQuestions(run.progress, run.state === "running" || run.state === "stopping");
}
function showQuestions(now, active) {
  const known = now.known, some = drawn.pictures.length > 0, grid = !some && now.planned > 0;
  say("matrix-title", run.state === "done" ? "What was found" : "The matrix so far");
  let note = "";
  if (run.state === "done" && !some) note = "Nothing was found that could be drawn.";
  else if (run.state === "done") note = "";
  else if (some && known !== null && known < 1) note = `${Math.round(100 * known)} % has been read so far; what was not counts as zero.`;
  else if (some) note = "All of it, to be certified yet.";
  else if (grid) note = "This method tells its matrices only at a later stage. Meanwhile, its questions:";
  say("matrix-note", note);
  show($("questions"), grid);
  if (grid) paintQuestions(now);
}
function paintQuestions(now) {
  const canvas = $("questions-canvas"), most = 3000, per = Math.max(1, Math.ceil(now.planned / most));
  const count = Math.ceil(now.planned / per), columns = Math.max(24, Math.ceil(Math.sqrt(count * 2.2))), rows = Math.ceil(count / columns), side = 8;
  canvas.width = columns * side;
  canvas.height = rows * side;
  const pen = canvas.getContext("2d"), colours = { journal: css("--journal"), fresh: css("--live"), open: css("--soft") };
  let place = 0;
  const fill = (queries, colour) => {
    const end = place + queries;
    for (let cell = Math.ceil(place / per); cell < Math.ceil(end / per); cell += 1) {
      pen.fillStyle = colour;
      pen.fillRect((cell % columns) * side + 1, Math.floor(cell / columns) * side + 1, side - 1, side - 1);
    }
    place = end;
  };
  for (const stage of now.stages) {
    fill(stage.journal, colours.journal);
    fill(stage.new, colours.fresh);
    fill(stage.planned - stage.new - stage.journal, colours.open);
  }
  canvas.setAttribute("aria-label", `${whole(now.queries)} of ${whole(now.planned)} questions planned so far are answered`);
}

// --- what heads attend to in a sentence ----------------------------------------------------------------------------

let weights = null;       // of the heads of the run shown
let opened = 0;           // the head that is large
async function showAttention() {
  const key = run.files.includes("attention.safetensors") ? `${run.id} ${run.attempts}` : "", card = $("attention");
  show(card, key !== "");
  if (card.dataset.key === key) return;
  card.dataset.key = key;
  weights = null;
  drawAttention();
  if (key === "") return;
  const { ok, data } = await ask(`/api/runs/${encodeURIComponent(run.id)}/attention`);
  if (card.dataset.key !== key) return;  // another run is shown by now
  if (!ok) { say("attention-note", `${data.error}.`); return; }
  weights = data;
  opened = data.heads.reduce((best, head, place) => (head.focus > data.heads[best].focus ? place : best), 0);
  const apart = data.apart === null ? "" : ` No weight is further than ${figure(data.apart)} from the attention that the model computes itself.`;
  say("attention-note", `“${data.sentence}” as the heads see it: every row is a token that looks, every column one that is looked at. Point at a square for its weight.${apart}`);
  drawAttention();
}
function drawAttention() {
  if (!weights) { $("attention-large").replaceChildren(); $("attention-heads").replaceChildren(); return; }
  const head = weights.heads[opened], name = head.name.charAt(0).toUpperCase() + head.name.slice(1);
  const sides = [[`${name}, recovered`, head.found], ...(head.original ? [[`${name}, of the model`, head.original]] : [])];
  $("attention-large").replaceChildren(...sides.map(([title, matrix]) =>
    make("figure", {}, make("figcaption", {}, title), tokenMap(title, weights.words, matrix))));
  $("attention-heads").replaceChildren(...weights.heads.map((each, place) => {
    const canvas = make("canvas", { "aria-hidden": "true" });
    paint(canvas, weights.words.length, weights.words.length, Int8Array.from(each.found.flat(), (weight) => Math.round(127 * Math.min(weight, 1))));
    const button = make("button", { type: "button", class: "small" }, canvas, make("small", {}, each.name));
    button.setAttribute("aria-pressed", String(place === opened));
    button.addEventListener("click", () => { opened = place; drawAttention(); $("attention-heads").children[place].focus(); });
    return button;
  }));
}
function tokenMap(title, names, matrix) {
  const cell = 16, words = names.map((word) => (word.length > 14 ? `${word.slice(0, 13)}…` : word));
  const room = Math.round(6 * Math.max(...words.map((word) => word.length))) + 6, side = cell * words.length;
  const looks = matrix.map((row, n) => { const best = row.indexOf(Math.max(...row)); return `${names[n]} at ${names[best]} (${row[best].toFixed(2)})`; });
  const svg = draw("svg", { class: "tokens", viewBox: `0 0 ${room + side + Math.round(room / 2)} ${room + side}`, role: "img",
    "aria-label": `${title}, what each token looks at most: ${looks.join("; ")}` });
  svg.append(draw("rect", { class: "frame", x: room, y: room, width: side, height: side }));
  words.forEach((word, n) => {
    const middle = room + cell * (n + 0.5);
    svg.append(draw("text", { x: room - 4, y: middle + 3.5, "text-anchor": "end" }, word));
    svg.append(draw("text", { transform: `translate(${middle + 3} ${room - 4}) rotate(-60)` }, word));
  });
  matrix.forEach((row, n) => row.forEach((weight, m) => {
    if (weight < 0.005) return;
    const square = draw("rect", { x: room + cell * m, y: room + cell * n, width: cell, height: cell, "fill-opacity": (Math.min(weight, 1) ** 0.75).toFixed(2) });
    square.append(draw("title", {}, `${names[n]} → ${names[m]}: ${weight.toFixed(3)}`));
    svg.append(square);
  }));
  return svg;
}

// --- comparing -----------------------------------------------------------------------------------------------------

function fillChoices() {
  const key = list.map((one) => one.id).join();
  if ($("choices").dataset.ids !== key) {
    $("choices").dataset.ids = key;
    $("choices").replaceChildren(...list.map((one) => {
      const box = make("input", { type: "checkbox", value: one.id });
      box.addEventListener("change", () => goTo(`#compare=${encodeURIComponent(chosen().join(","))}`));
      return make("label", { class: "inline" }, box, one.id);
    }));
  }
  for (const box of $("choices").querySelectorAll("input")) {
    box.checked = comparing.includes(box.value);
    box.disabled = !box.checked && comparing.length >= MOST_COMPARED;
  }
}
const chosen = () => [...$("choices").querySelectorAll("input:checked")].map((box) => box.value);
function showDistances(data) {
  const many = data.runs.length > 2, apart = data.distances[0][1];
  const note = data.notes.length ? `No distance: ${data.notes.join("; ")}.` : "";
  if (many) say("apart", `Relative distances of what was found, up to what no query can tell apart. ${note}`);
  else $("apart").replaceChildren(...(apart === null ? [note] :
    ["What they found is ", make("strong", {}, figure(apart)), " apart: the relative distance, up to what no query can tell apart."]));
  show($("distances"), many);
  if (!many) { $("distances").replaceChildren(); return; }
  const name = (one, scope) => make("th", { scope }, one.id);
  $("distances").replaceChildren(make("table", { id: "apart-table" }, make("caption", { class: "hidden" }, "Relative distances of what was found"),
    make("thead", {}, make("tr", {}, make("td"), ...data.runs.map((one) => name(one, "col")))),
    make("tbody", {}, ...data.runs.map((one, row) => make("tr", {}, name(one, "row"),
      ...data.distances[row].map((each, column) => make("td", {}, row === column ? "" : figure(each))))))));
}
let wanted = 0;
async function showCompare() {
  fillChoices();
  const mine = ++wanted;
  const { ok, data } = await ask(`/api/compare?names=${encodeURIComponent(comparing.join(","))}`);
  if (mine !== wanted || !comparing) return;  // something else is wanted by now
  say("compare-error", ok ? "" : `${data.error}.`);
  show($("table"), ok);
  show($("sides"), ok);
  if (!ok) { say("apart", ""); $("distances").replaceChildren(); return; }
  showDistances(data);
  const result = (one) => one.ending?.result, rows = [
    ["Box", (one) => one.label],
    ["Outcome", (one) => (result(one) ? words(result(one).outcome) : one.state)],
    ["Method", (one) => result(one)?.method ?? one.method],
    ["Queries", (one) => whole(result(one)?.queries ?? one.progress.queries)],
    ["Fewest possible", (one) => (result(one)?.counting_bound ? whole(result(one).counting_bound) : "–")],
    ["Queries over that", (one) => (result(one)?.ratio ? `${result(one).ratio.toFixed(3)} ×` : "–")],
    ["Held-out error, relative", (one) => figure(typicalError(one.ending))],
    ["Worst over its error bar", (one) => figure(result(one)?.worst_ratio)],
    ["Distance from the truth", (one) => figure(one.ending?.distance)],
    ["Asked now, from the journal", (one) => `${whole(one.progress.new)}, ${whole(one.progress.journal)}`],
    ["Seconds", (one) => figure(result(one)?.seconds)],
  ];
  $("names").replaceChildren(make("tr", {}, make("td"), ...data.runs.map((one) => make("th", { scope: "col" }, one.id))));
  $("rows").replaceChildren(...rows.map(([name, read]) => make("tr", {}, make("th", { scope: "row" }, name), ...data.runs.map((one) => make("td", {}, read(one))))));
  $("sides").replaceChildren(...data.runs.map((one, place) => make("div", { class: "pictures" },
    ...(data.runs.length > 2 ? [make("h4", {}, one.id)] : []),
    ...(data.pictures[place].length ? data.pictures[place].map((each) => pictureOf(each)) : [make("p", { class: "faint" }, "Nothing so far.")]))));
}

// --- the form ------------------------------------------------------------------------------------------------------

function showFields() {
  const family = families.find((one) => one.name === $("family").value);
  $("fields").replaceChildren(...(family?.fields ?? []).map((field) => make("div", { class: `field ${field.name}` },
    make("label", { htmlFor: `field-${field.name}` }, field.label),
    make("input", { id: `field-${field.name}`, name: field.name, value: field.default === null ? "" : String(field.default),
      inputMode: field.whole ? "numeric" : "decimal", "aria-describedby": `hint-${field.name} error-${field.name}` }),
    make("p", { class: "faint", id: `hint-${field.name}` }, field.hint),
    make("p", { class: "error", id: `error-${field.name}` }))));
}
function showMistakes(fields) {
  let first = null;
  for (const input of $("form").querySelectorAll("input, select")) {
    const reason = fields[input.name] ?? "", place = $(input.name === "family" ? "family-error" : `error-${input.name}`);
    place.textContent = reason ? `Must be ${reason}.` : "";
    if (reason) { input.setAttribute("aria-invalid", "true"); first = first ?? input; } else input.removeAttribute("aria-invalid");
  }
  if (first) first.focus();
}

async function begin() {
  $("family").addEventListener("change", showFields);
  $("form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const given = Object.fromEntries(new FormData($("form")));
    const { ok, data } = await ask("/api/runs", given);
    showMistakes(data.fields ?? {});
    say("form-error", ok || data.fields ? "" : `${data.error}.`);
    if (ok) goTo(`#run=${encodeURIComponent(data.id)}`);
  });
  const act = async (what, body) => {
    const { ok, data } = await ask(`/api/runs/${encodeURIComponent(selected)}/${what}`, body);
    say("action-error", ok ? "" : `${data.error}.`);
    if (ok) $("new-budget").value = "";
  };
  $("filter").addEventListener("input", showList);
  $("remarks-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const { ok, data } = await ask(`/api/runs/${encodeURIComponent(selected)}/remarks`, Object.fromEntries(new FormData($("remarks-form"))));
    for (const name of ["tags", "note"]) say(`error-${name}`, data.fields?.[name] ? `Must be ${data.fields[name]}.` : "");
    say("remarks-said", ok ? "Kept." : data.fields ? "" : `${data.error}.`);
  });
  $("stop").addEventListener("click", () => { if (run.state === "running") act("stop", {}); });
  $("resume").addEventListener("click", () => act("resume", run.least_budget === null ? {} : { budget: $("new-budget").value }));
  $("to-compare").addEventListener("click", () => goTo(`#compare=${encodeURIComponent(list.slice(0, 2).map((one) => one.id).join(","))}`));
  $("leave-compare").addEventListener("click", () => goTo(selected ? `#run=${encodeURIComponent(selected)}` : "#"));
  addEventListener("hashchange", route);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { showPictures(); drawAttention(); if (comparing) showCompare(); });
  route();
  const { ok, data } = await ask("/api/form");
  if (!ok) { say("form-error", `${data.error}.`); return; }
  families = data.families;
  $("family").replaceChildren(...families.map((one) => make("option", { value: one.name }, one.label)));
  showFields();
}

begin();
