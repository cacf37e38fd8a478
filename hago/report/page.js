"use strict";
// What the page of a report does: it draws the plots from the JSON document that the page holds, and follows hovers,
// clicks and keys. Names in models are hostile: texts are only ever set as text nodes, never parsed as HTML.
(() => {
const R = JSON.parse(document.getElementById("report").textContent);
const $ = (id) => document.getElementById(id);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const NONE = "–";
const MINUS = "−";
// the largest SQNR, which is that of outputs without noise
const MOST_DB = 200;
const T = R.trials;
const FRONT = new Set(T ? T.front : []);
const LEFT_OUT = "left out of this page, since the log is long";
const isMissing = (value) => value === null || value === undefined;

// ---------------------------------------------------------------- elements
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  return filled(made, attributes, children);
}
function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}
function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") made.addEventListener("click", value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) made.append(child);
  return made;
}
// titles that begin with ">" are of columns of numbers
function table(titles, rows, caption) {
  const numbers = titles.map((title) => title.startsWith(">"));
  const cell = (tag, value, number, scope) => element(tag, { class: number ? "n" : null, scope }, isMissing(value) ? "" : value);
  const head = element("thead", {}, element("tr", {}, titles.map((title, i) => cell("th", title.replace(/^>/, ""), numbers[i], "col"))));
  const body = element("tbody", {}, rows.map((row) => element("tr", {}, row.map((value, i) => cell(i ? "td" : "th", value, numbers[i], i ? null : "row")))));
  const made = element("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": caption || titles[0] }, element("table", {}, head, body));
  return caption ? element("div", {}, element("p", { class: "caption" }, caption), made) : made;
}
function facts(pairs) {
  return element("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

// ---------------------------------------------------------------- numbers
// of arrays of any length; browsers refuse calls of 100,000 arguments
const least = (values, before = Infinity) => values.reduce((found, each) => Math.min(found, each), before);
const largest = (values, before = -Infinity) => values.reduce((found, each) => Math.max(found, each), before);
// none where one of both was not measured
const less = (value, other) => isMissing(value) || isMissing(other) ? null : value - other;
// numbers are rounded as Python rounds those of the tables: by their exact decimals, and to even between two
function even(near, exact) {
  if (!/50{24}$/.test(exact)) return near;
  const below = exact.slice(0, -25).replace(/\.$/, "");
  return /[02468]$/.test(below) ? below : near;
}
const fixed = (value, places) => even(value.toFixed(places), value.toFixed(places + 25));
// a number with so many significant digits: as such, and in its parts, a number from 1 to 10 and a power of ten
function precise(value, count) {
  const [[near, power], [exact, exactPower]] = [count - 1, count + 24].map((places) => value.toExponential(places).split("e"));
  const rounded = even(near, exact);
  return [Number(`${rounded}e${rounded === near ? power : exactPower}`), Number(rounded), Number(rounded === near ? power : exactPower)];
}
// a number as "%.6g" writes it
function general(value, count) {
  if (isMissing(value)) return NONE;
  if (value < 0) return MINUS + general(-value, count);
  const [rounded, leading, power] = precise(value, count);
  return power < -4 || power >= count ? `${leading}e${power < 0 ? "-" : "+"}${String(Math.abs(power)).padStart(2, "0")}` : String(rounded);
}
function digits(value, count = 4) {
  if (isMissing(value)) return NONE;
  if (value < 0) return MINUS + digits(-value, count);
  const [rounded, leading, power] = precise(value, count);
  return value !== 0 && (value >= 1e5 || value < 1e-3) ? `${leading}e${power < 0 ? "-" : "+"}${Math.abs(power)}` : String(rounded);
}
const signed = (value, text) => `${value < 0 ? MINUS : ""}${text}`;
const percent = (value, places = 1) => isMissing(value) ? NONE
  : value && Math.abs(value) < 10 ** -(places + 2) ? `< ${(10 ** -places).toFixed(places)} %` : signed(value, `${fixed(Math.abs(100 * value), places)} %`);
const decibels = (value, places = 2) => isMissing(value) ? NONE : value >= MOST_DB ? "exact" : signed(value, `${fixed(Math.abs(value), places)} dB`);
function scaled(value, units, count = 4) {
  const [size, name] = units.find(([from]) => Math.abs(value) >= from) || units[units.length - 1];
  return `${general(value / size, count)} ${name}`;
}
const THOUSANDS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];
// of amounts that are compared, `beside` has all: bytes are in the largest unit of which the least, if it is not 0, has a tenth
function amount(figure, value, beside = [value]) {
  if (isMissing(value)) return NONE;
  if (figure.unit === "B") {
    const amounts = beside.map((each) => each || 0), most = largest(amounts), smallest = least(amounts.filter((each) => each > 0), most);
    const [size, name] = [[1024 ** 3, "GiB"], [1024 ** 2, "MiB"], [1024, "KiB"]].find(([from]) => Math.min(10 * smallest, most) >= from) || [1, "B"];
    return `${fixed(value / size, size === 1 ? 0 : smallest >= 10 * size ? 1 : smallest >= size ? 2 : 3)} ${name}`;
  }
  if (figure.unit === "s") return scaled(value, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]]);
  if (figure.unit === "J") return scaled(value, [[1, "J"], [1e-3, "mJ"], [1e-6, "µJ"], [1e-9, "nJ"]]);
  if (figure.unit === "bits") return `${general(value, 4)} bits`;
  const whole = Number(fixed(value, 0));
  return whole < 1000 ? String(whole) : scaled(whole, THOUSANDS, 3).replace(" ", "");
}
// a value of a measure, by its name
function figureText(name, value) {
  if (isMissing(value)) return NONE;
  if (SHARES.includes(name)) return signed(value, `${fixed(Math.abs(100 * value), 2)} %`);
  return name === "sqnr" ? decibels(value) : general(value, 6);
}
const SHARES = ["sim_acc", "agreement"];
const measured = (value) => figureText(R.measure.name, value);
function measuredRange(low, high) {
  const [from, to] = [measured(low), measured(high)];
  return from === "exact" && to === from ? to : `${from} to ${to}`;
}
function shift(value, name) {
  if (isMissing(value)) return NONE;
  const sign = value >= 0 ? "+" : MINUS, size = Math.abs(value);
  if (SHARES.includes(name)) return `${sign}${fixed(100 * size, 2)} points`;
  return sign + (name === "sqnr" ? decibels(size) : general(size, 4));
}
const costNamed = (name) => R.costs.find((cost) => cost.name === name) || { name, title: name, unit: "" };
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 2.5, 5, 10].find((each) => each * power >= rough) || 10);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
}
// ticks of bytes are round in their unit
function costTicks(figure, low, high, count) {
  if (figure.unit !== "B") return ticks(low, high, count);
  const unit = byteUnit(high);
  return ticks(low / unit, high / unit, count).map((tick) => tick * unit);
}
const byteUnit = (high) => high >= 2 * 1024 ** 2 ? 1024 ** 2 : high >= 2048 ? 1024 : 1;
function tickText(figure, value, high) {
  if (figure.unit !== "B") return figure.unit === "" || figure.unit === "cycles" ? value >= 1000 ? scaled(value, THOUSANDS).replace(" ", "") : digits(value) : amount(figure, value);
  const unit = byteUnit(high);
  return `${digits(value / unit, 6)} ${{ 1: "B", 1024: "KiB", 1048576: "MiB" }[unit]}`;
}

// ---------------------------------------------------------------- what is chosen
// A choice is {point: i}, a point in full, or {trial: i}, a trial of which only bits and costs are there.
const state = { a: null, b: null, node: null, colour: "bits", cost: null, front: T ? T.front_cost : null };
const key = (choice) => choice === null ? "" : "point" in choice ? `p${choice.point}` : `t${choice.trial}`;
function choiceOf(text) {
  if (!text) return null;
  return text[0] === "p" ? { point: Number(text.slice(1)) } : { trial: Number(text.slice(1)) };
}
function choiceOfTrial(trial) {
  const front = R.points.findIndex((point) => point.trial === trial && point.kind !== "strategy");
  const any = front >= 0 ? front : R.points.findIndex((point) => point.trial === trial);
  return any >= 0 ? { point: any } : { trial };
}
// the trials that the table lists: of a long log, not all
const LISTED = all("#front details [data-trial]").map((button) => Number(button.dataset.trial));
const pointOf = (choice) => choice && "point" in choice ? R.points[choice.point] : null;
const trialOf = (choice) => choice === null ? null : "trial" in choice ? choice.trial : R.points[choice.point].trial;
const titleOf = (choice) => choice === null ? "nothing" : pointOf(choice) ? pointOf(choice).title : `trial ${choice.trial}`;
// by group of edges; none where they are left out
function bitsOf(choice) {
  const point = pointOf(choice);
  if (point) return point.bits;
  const text = T.bits[choice.trial];
  if (!text && T.groups.length) return null;
  return Object.fromEntries([...text].map((digit, i) => [T.groups[i], parseInt(digit, 36)]));
}
function costsOf(choice) {
  const point = pointOf(choice);
  return point ? point.costs : Object.fromEntries(Object.entries(T.costs).map(([name, column]) => [name, column[choice.trial]]));
}
function bitsText(bits) {
  const counts = {};
  for (const each of Object.values(bits)) counts[each] = (counts[each] || 0) + 1;
  return Object.keys(counts).map(Number).sort((x, y) => y - x).map((each) => `${counts[each]} × ${each}`).join(", ");
}
// a page without a point in full shows the network of the first drawing
const drawingOf = (choice) => pointOf(choice) ? pointOf(choice).drawing : 0;

function options(select, chosen, empty) {
  select.replaceChildren();
  if (empty) select.append(element("option", { value: "" }, empty));
  if (R.points.length) select.append(element("optgroup", { label: "full details" }, R.points.map((point, i) => element("option", { value: `p${i}` }, point.title))));
  const rest = LISTED.filter((i) => !("point" in choiceOfTrial(i)));
  if (rest.length) select.append(element("optgroup", { label: "bits and costs alone" }, rest.map(optionOf)));
  pick(select, chosen);
}
const optionOf = (trial) => element("option", { value: `t${trial}` }, `trial ${trial}${FRONT.has(trial) ? " (front)" : ""}`);
// a trial that is not listed is added when it is chosen
function pick(select, choice) {
  if (choice !== null && "trial" in choice && !select.querySelector(`option[value="${key(choice)}"]`)) select.lastElementChild.append(optionOf(choice.trial));
  select.value = key(choice);
}
function choose(choice) {
  state.a = choice;
  pick($("pick-a"), choice);
  render();
}
function compareWith(choice) {
  state.b = choice;
  pick($("pick-b"), choice);
  render();
}

// what the reader works with stays where it is on the screen while parts above it grow or shrink
function render() {
  const held = document.activeElement && $("main").contains(document.activeElement) ? document.activeElement : null;
  const before = held && held.getBoundingClientRect().top;
  renderAll();
  if (held && held.isConnected) scrollBy({ top: held.getBoundingClientRect().top - before, behavior: "instant" });
}
function renderAll() {
  const point = pointOf(state.a);
  for (const each of all("[data-point]")) each.hidden = !("point" in (state.a || {})) || Number(each.dataset.point) !== state.a.point;
  for (const each of all("[data-no-detail]")) {
    each.hidden = Boolean(point) || state.a === null;
    if (state.a !== null) each.textContent = `${titleOf(state.a).replace(/^t/, "T")} is not among the points that are shown in full, so of it there are bits and costs alone.`;
  }
  renderTrialOnly();
  markPlots();
  renderComparison();
  renderNetwork();
}
function renderTrialOnly() {
  const place = document.querySelector("[data-trial-only]");
  if (!place) return;
  place.hidden = !(state.a && "trial" in state.a);
  if (place.hidden) return;
  const i = state.a.trial, bits = bitsOf(state.a);
  place.replaceChildren(
    element("p", { class: "note" }, `Trial ${i} is shown with its bits and costs. What needs its thresholds (errors, scales, overflow) is there for the points that are shown in full.`),
    facts([[R.measure.title + SEARCHED, `${measured(T.value[i])}${T.low[i] === null ? "" : ` (95 %: ${measuredRange(T.low[i], T.high[i])})`}`],
      ...R.costs.filter((cost) => cost.name in T.costs).map((cost) => [cost.title, amount(cost, T.costs[cost.name][i])]),
      ["bits", bits === null ? LEFT_OUT : bitsText(bits)],
      ["state", stateOf(i)], ["asked because", T.why[T.reason[i]]]]));
}

// ---------------------------------------------------------------- plots of trials
const FRAME = { left: 62, right: 18, top: 16, bottom: 44 };
function frame(width, height, xs, ys, xText, yText, xTitle, yTitle) {
  const made = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0 });
  for (const [at, value] of ys) made.append(svg("line", { class: "grid", x1: FRAME.left, x2: width - FRAME.right, y1: at, y2: at }), svg("text", { x: FRAME.left - 8, y: at + 4, "text-anchor": "end" }, yText(value)));
  for (const [at] of xs) made.append(svg("line", { class: "grid", x1: at, x2: at, y1: FRAME.top, y2: height - FRAME.bottom }));
  for (const [at, value] of xs) made.append(svg("line", { class: "axis", x1: at, x2: at, y1: height - FRAME.bottom, y2: height - FRAME.bottom + 5 }), svg("text", { x: at, y: height - FRAME.bottom + 19, "text-anchor": "middle" }, xText(value)));
  made.append(svg("line", { class: "axis", x1: FRAME.left, x2: width - FRAME.right, y1: height - FRAME.bottom, y2: height - FRAME.bottom }),
    svg("text", { class: "title", x: width - FRAME.right, y: height - 6, "text-anchor": "end" }, xTitle), svg("text", { class: "title", x: 4, y: 11 }, yTitle));
  return made;
}
function scaleOf(values, from, to, margin = 0.04) {
  let low = least(values), high = largest(values);
  if (!(high > low)) { low -= Math.abs(low) * 0.05 || 1; high += Math.abs(high) * 0.05 || 1; }
  const pad = (high - low) * margin;
  low -= pad; high += pad;
  return { low, high, at: (value) => from + (to - from) * (value - low) / (high - low) };
}
const sizeOf = (figure) => { const width = Math.max(320, Math.round(figure.clientWidth)); return [width, width < 560 ? 300 : 400]; };
// values that are drawn are in % for shares of samples
const isShare = SHARES.includes(R.measure.name);
const drawn = (value) => isShare ? 100 * value : value;
const unitText = isShare ? "%" : R.measure.name === "sqnr" ? "dB" : "";
const axisTitle = unitText ? `${R.measure.title} in ${unitText}` : R.measure.title;

const plots = {};
// what the measures of trials are of
const SEARCHED = ` on the calibration data${R.search && R.search.uncorrected ? ", before layers were corrected" : ""}`;
const stateOf = (i) => T.rejected[i] || (i === T.best && T.best_note ? T.best_note : FRONT.has(i) ? "on the front" : "");
// the objective of a point that is not as its trial was measured, on the data of the search
function strategyValue(point) {
  const apart = point.kind === "strategy" || point.kind === "few bits" || point.kind === "front" && R.search && R.search.uncorrected && !point.uncorrected;
  const verdict = apart && point.verdicts.find((each) => each.data === "calibration data");
  const value = verdict ? verdict.models.find((model) => model.name === "simulated").figures[R.measure.name] : null;
  return value === undefined ? null : value;
}
function drawFront() {
  const place = $("front-plot");
  if (!place) return;
  const cost = costNamed(state.front), column = T.costs[state.front];
  const shown = T.value.map((value, i) => i).filter((i) => T.value[i] !== null && column[i] !== null);
  if (!shown.length) { place.replaceChildren(element("p", { class: "note" }, "No trial has been measured yet.")); return; }
  const [width, height] = sizeOf(place);
  const own = R.points.map((point, i) => [i, point.costs[state.front], strategyValue(point)]).filter(([, at, value]) => at !== undefined && value !== null);
  const x = scaleOf([...shown.map((i) => column[i]), ...own.map(([, at]) => at)], FRAME.left, width - FRAME.right);
  const y = scaleOf([...own.map(([, , value]) => drawn(value)), ...shown.flatMap((i) => FRONT.has(i) && T.low[i] !== null ? [drawn(T.value[i]), drawn(T.low[i]), drawn(T.high[i])] : [drawn(T.value[i])])], height - FRAME.bottom, FRAME.top);
  const made = frame(width, height, costTicks(cost, x.low, x.high, width / 110).map((v) => [x.at(v), v]), ticks(y.low, y.high, height / 60).map((v) => [y.at(v), v]),
    (v) => tickText(cost, v, x.high), (v) => digits(v), cost.title, axisTitle);
  made.setAttribute("aria-label", `${R.measure.title} against ${cost.title} of ${shown.length} trials; the table below has the same figures`);
  const front = T.front.filter((i) => T.value[i] !== null && column[i] !== null);
  for (const i of front) if (T.low[i] !== null) made.append(svg("line", { class: "whisker", x1: x.at(column[i]), x2: x.at(column[i]), y1: y.at(drawn(T.low[i])), y2: y.at(drawn(T.high[i])) }));
  if (state.front === T.front_cost) made.append(svg("polyline", { class: "front-line", points: front.map((i) => `${x.at(column[i])},${y.at(drawn(T.value[i]))}`).join(" ") }));
  const full = new Set(R.points.map((point) => point.trial));
  const order = [...shown].sort((i, j) => FRONT.has(i) - FRONT.has(j));
  for (const i of order) {
    const kind = T.rejected[i] ? "dot rejected" : FRONT.has(i) ? "dot front" : "dot";
    const dot = svg("circle", { class: `${kind} ${full.has(i) ? "full" : "hollow"}`, cx: x.at(column[i]), cy: y.at(drawn(T.value[i])), r: full.has(i) ? 6 : FRONT.has(i) ? 4.5 : 3.5, "data-trial": i });
    made.append(dot);
  }
  const strategies = {};
  for (const [i, cost_of, value] of own.reverse()) { // the first is on top
    const at = [x.at(cost_of), y.at(drawn(value))];
    strategies[i] = at;
    const diamond = svg("path", { class: "diamond", d: `M${at[0]} ${at[1] - 7}l7 7l-7 7l-7-7z`, "data-point-of": i }, svg("title", {}, `${R.points[i].title}: ${measured(value)}, ${amount(cost, cost_of)}`));
    diamond.addEventListener("click", (event) => { event.stopPropagation(); choose({ point: i }); });
    made.append(diamond);
  }
  const costs = shown.map((i) => column[i]), spread = largest(costs) - least(costs);
  $("front-equal").hidden = spread > 0;
  $("front-equal").textContent = `${cost.title[0].toUpperCase()}${cost.title.slice(1)} is ${amount(cost, column[shown[0]])} for all ${shown.length} trials: what they vary does not change it.`;
  const values = shown.map((i) => T.value[i]);
  $("front-same").hidden = shown.length < 2 || largest(values) > least(values);
  $("front-same").textContent = `${R.measure.title} is ${measured(values[0])} for all ${shown.length} trials${SEARCHED}.`;
  place.replaceChildren(made);
  plots.front = { made, strategies, at: (i) => column[i] === null || T.value[i] === null ? null : [x.at(column[i]), y.at(drawn(T.value[i]))], order: [...shown].sort((i, j) => column[i] - column[j] || i - j), readout: $("front-readout") };
  follow(plots.front);
}
function drawSearch() {
  const place = $("search-plot");
  if (!place || !T) return;
  const shown = T.value.map((value, i) => i).filter((i) => T.value[i] !== null);
  if (!shown.length) return;
  const [width] = sizeOf(place), height = 300;
  const x = scaleOf([0, Math.max(1, T.value.length - 1)], FRAME.left, width - FRAME.right, 0.02);
  const y = scaleOf(shown.map((i) => drawn(T.value[i])), height - FRAME.bottom, FRAME.top);
  const made = frame(width, height, ticks(Math.max(0, x.low), x.high, Math.min(width / 90, T.value.length)).filter((v) => Number.isInteger(v)).map((v) => [x.at(v), v]), ticks(y.low, y.high, 5).map((v) => [y.at(v), v]),
    (v) => String(v), (v) => digits(v), "trial", axisTitle);
  made.setAttribute("aria-label", `${R.measure.title} of every trial, and the best so far; the table of trials has the same figures`);
  // the first, and those that are better in the measure itself
  const raised = (i) => T.gain[i] !== null && (T.gain[i] > 0 || T.gain.findIndex((gain) => gain !== null) === i);
  const steps = [];
  let best = null;
  T.gain.forEach((gain, i) => {
    if (gain === null) return;
    if (best !== null) steps.push(`${x.at(i)},${y.at(best)}`);
    best = drawn(T.value[i]);
    steps.push(`${x.at(i)},${y.at(best)}`);
  });
  if (best !== null) made.append(svg("polyline", { class: "best-line", points: [...steps, `${x.at(T.value.length - 1)},${y.at(best)}`].join(" ") }));
  for (const i of shown) made.append(svg("circle", { class: T.rejected[i] ? "dot rejected" : raised(i) ? "dot front" : "dot", cx: x.at(i), cy: y.at(drawn(T.value[i])), r: raised(i) ? 4.5 : 3, "data-trial": i }));
  place.replaceChildren(made);
  plots.search = { made, at: (i) => T.value[i] === null ? null : [x.at(i), y.at(drawn(T.value[i]))], order: shown, readout: $("search-readout") };
  follow(plots.search);
}
// hover, click and keys of a plot
function follow(plot) {
  const nearest = (event) => {
    const box = plot.made.getBoundingClientRect(), factor = plot.made.viewBox.baseVal.width / box.width;
    const [px, py] = [(event.clientX - box.left) * factor, (event.clientY - box.top) * factor];
    let found = null, least = 26 ** 2;
    for (const i of plot.order) {
      const at = plot.at(i);
      const distance = (at[0] - px) ** 2 + (at[1] - py) ** 2;
      if (distance < least) [found, least] = [i, distance];
    }
    return found;
  };
  plot.made.addEventListener("mousemove", (event) => { const i = nearest(event); plot.made.style.cursor = i === null ? "" : "pointer"; if (i !== null) tell(plot, i); });
  plot.made.addEventListener("mouseleave", () => tellChoice(plot, state.a));
  plot.made.addEventListener("blur", () => { for (const each of all(".cursor", plot.made)) each.remove(); });
  plot.made.addEventListener("click", (event) => { const i = nearest(event); if (i !== null) choose(choiceOfTrial(i)); });
  plot.made.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) {
      const here = plot.order.indexOf(plot.told);
      tell(plot, plot.order[Math.min(plot.order.length - 1, Math.max(0, here + step))]);
      for (const each of all(".cursor", plot.made)) each.remove();
      mark(plot, "ring cursor", plot.at(plot.told), `trial ${plot.told}: ${measured(T.value[plot.told])}`);
      event.preventDefault();
    } else if ((event.key === "Enter" || event.key === " ") && plot.told !== null && plot.told !== undefined) {
      choose(choiceOfTrial(plot.told));
      event.preventDefault();
    }
  });
}
function tell(plot, i) {
  plot.told = i;
  if (i === null || i === undefined) { plot.readout.replaceChildren("Point at a dot to see its bits."); return; }
  const interval = T.low[i] === null ? "" : ` (95 %: ${measuredRange(T.low[i], T.high[i])})`;
  const costs = Object.keys(T.costs).filter((name) => name === state.front || name === T.front_cost || name === "effective_bits");
  const hidden = underneath(plot, i);
  const also = hidden.length ? ` At the same place: ${hidden.slice(0, 6).map((j) => `trial ${j}`).join(", ")}${hidden.length > 6 ? ` and ${hidden.length - 6} more` : ""}.` : "";
  const bits = T.bits[i] ? `; bits of edges, as groups × bits: ${bitsText(bitsOf({ trial: i }))}` : "";
  plot.readout.replaceChildren(element("b", {}, `Trial ${i}`), `: ${R.measure.title} ${measured(T.value[i])}${interval}${SEARCHED}; ${costs.map((name) => `${costNamed(name).title} ${amount(costNamed(name), T.costs[name][i])}`).join(", ")}${bits}${T.rejected[i] || i === T.best && T.best_note ? `; ${stateOf(i)}` : ""}. ${T.why[T.reason[i]]}${also}`);
}
// the other trials whose dots cover that of a trial
function underneath(plot, i) {
  const at = plot.at(i);
  return at === null ? [] : plot.order.filter((j) => j !== i && Math.hypot(plot.at(j)[0] - at[0], plot.at(j)[1] - at[1]) < 2);
}
function tellChoice(plot, choice) {
  tell(plot, trialOf(choice));
  if (!plot.strategies || choice === null || !(choice.point in plot.strategies)) return;
  const point = pointOf(choice), cost = costNamed(state.front);
  plot.readout.replaceChildren(element("b", {}, point.title), `: ${R.measure.title} ${measured(strategyValue(point))} on the calibration data; ${cost.title} ${amount(cost, point.costs[cost.name])}; bits of edges: ${bitsText(point.bits)}.`);
}
function placeOf(plot, choice) {
  if (choice === null) return null;
  if (plot.strategies && choice.point in plot.strategies) return plot.strategies[choice.point];
  const trial = trialOf(choice);
  return trial === null ? null : plot.at(trial);
}
function mark(plot, kind, at, label) {
  if (at === null) return;
  plot.made.append(svg("circle", { class: kind, cx: at[0], cy: at[1], r: 9 }));
  const cursor = kind === "ring cursor";
  const wide = at[0] < plot.made.viewBox.baseVal.width - (cursor ? 150 : 60);
  if (label) plot.made.append(svg("text", { class: `ring-label${kind === "ring b" ? " b" : cursor ? " cursor" : ""}`, x: at[0] + (wide ? 12 : -12), y: at[1] + (cursor ? -10 : 16), "text-anchor": wide ? "start" : "end" }, label));
}
function markPlots() {
  for (const plot of Object.values(plots)) {
    for (const each of all(".ring, .ring-label", plot.made)) each.remove();
    mark(plot, "ring", placeOf(plot, state.a), state.b === null ? "shown" : "A");
    mark(plot, "ring b", placeOf(plot, state.b), "B");
    tellChoice(plot, state.a);
  }
}

// ---------------------------------------------------------------- two points side by side
function figureOf(choice, data, name) {
  const verdict = pointOf(choice).verdicts.find((each) => each.data === data);
  const value = verdict && verdict.models.find((model) => model.name === "simulated").figures[name];
  return figureText(name, value);
}
function renderComparison() {
  const place = $("compare");
  place.hidden = state.b === null || state.a === null;
  $("to-compare").hidden = place.hidden;
  if (place.hidden) return;
  const uncorrected = (choice) => pointOf(choice) ? pointOf(choice).uncorrected : R.search && R.search.uncorrected;
  const [a, b] = [state.a, state.b].map((choice) => `${titleOf(choice)}${!pointOf(choice) && uncorrected(choice) ? ", before layers were corrected" : ""}`);
  const body = [element("p", { class: "lead" }, element("b", {}, "A"), ` is ${a}, `, element("b", {}, "B"), ` is ${b}.`)];
  if (pointOf(state.a) && pointOf(state.b) && key(state.a) !== key(state.b)) {
    const [i, j] = [state.a.point, state.b.point], turned = i > j;
    const pairs = R.pairs.filter((pair) => pair.first === Math.min(i, j) && pair.second === Math.max(i, j));
    const sign = turned ? -1 : 1;
    const rows = pairs.flatMap((pair) => pair.figures.map((figure) => {
      const ends = [figure.low, figure.high].map((end) => end === null ? null : sign * end).sort((x, y) => x - y);
      const better = figure.better === "" ? "neither: may be chance" : figure.better === String(i) ? "A" : "B";
      const name = { sim_acc: "accuracy", sqnr: "SQNR" }[figure.measure] || figure.measure;
      const [of_a, of_b] = [figureOf(state.a, pair.data, figure.measure), figureOf(state.b, pair.data, figure.measure)];
      const equal = figure.difference === 0 && figure.low === 0 && figure.high === 0;
      return [name, pair.data, equal ? "equal" : better, of_a, of_b, shift(figure.difference === null ? null : sign * figure.difference, figure.measure), ends[0] === null ? NONE : `${shift(ends[0], figure.measure).split(" ")[0]} to ${shift(ends[1], figure.measure)}`];
    }));
    if (rows.length) body.push(table(["measure", "on", "surely better", ">A", ">B", ">B − A", ">95 % interval"], rows, "Measured on the same samples, paired sample by sample"));
    if (rows.length && uncorrected(state.a) !== uncorrected(state.b)) {
      const [with_, without, trial] = uncorrected(state.a) ? ["B", "A", trialOf(state.b)] : ["A", "B", trialOf(state.a)];
      body.push(element("p", { class: "note" }, `Layers of ${with_} were corrected and those of ${without} were not, so the difference is not of bits alone.${trial === null ? "" : ` Choose trial ${trial} in place of ${with_} to compare bits.`}`));
    }
  } else {
    const [x, y] = [trialOf(state.a), trialOf(state.b)];
    if (T && x !== null && y !== null) body.push(table(["measure", ">A", ">B", ">B − A"], [[`${R.measure.title}${SEARCHED}: trials ${x} and ${y}`, measured(T.value[x]), measured(T.value[y]), shift(less(T.value[y], T.value[x]), R.measure.name)]]));
    for (const [name, choice] of [["A", state.a], ["B", state.b]]) if (pointOf(choice) && strategyValue(pointOf(choice)) !== null && R.search && R.search.uncorrected)
      body.push(element("p", { class: "soft" }, `Layers of ${name} were corrected: with them its ${R.measure.title} is ${measured(strategyValue(pointOf(choice)))} on the calibration data, which no trial compares with.`));
    body.push(element("p", { class: "note" }, "Paired intervals are there for two points that are shown in full."));
  }
  const [first, second] = [costsOf(state.a), costsOf(state.b)];
  const names = R.costs.filter((cost) => cost.name in first && cost.name in second);
  const costs = element("div", {}, element("h3", {}, "Costs"), table(["cost", ">A", ">B", ">B / A"], names.map((cost) => [cost.title, ...[first, second].map((of) => amount(cost, of[cost.name], [first[cost.name], second[cost.name]])), first[cost.name] && !isMissing(second[cost.name]) ? fixed(second[cost.name] / first[cost.name], 3) : NONE])));
  const packed = "stored_bytes" in first && "stored_bytes" in second && first.stored_bytes !== null && first.stored_bytes === second.stored_bytes && first.weight_bytes !== second.weight_bytes;
  if (packed) costs.append(element("p", { class: "soft" }, `${R.hardware.name} stores the weights of both in the same ${amount(costNamed("stored_bytes"), first.stored_bytes)}: fewer bits save nothing that is stored.`));
  const [ours, theirs] = [bitsOf(state.a), bitsOf(state.b)];
  const without = [["A", ours], ["B", theirs]].filter(([, of]) => of === null).map(([name]) => name);
  const groups = without.length ? [] : [...new Set([...Object.keys(ours), ...Object.keys(theirs)])];
  const differ = groups.filter((group) => ours[group] !== theirs[group]);
  const bits = element("div", {}, element("h3", {}, "Bits"));
  if (without.length) bits.append(element("p", {}, `Bits of ${without.join(" and ")} are ${LEFT_OUT}.`));
  else if (!differ.length) bits.append(element("p", {}, `Bits are equal in all ${groups.length} groups of edges; thresholds or corrections may differ.`));
  else {
    const named = (value) => value === undefined ? "float" : value;
    const change = (group) => ours[group] === undefined || theirs[group] === undefined ? NONE : `${theirs[group] > ours[group] ? "+" : "−"}${Math.abs(theirs[group] - ours[group])}`;
    const made = table(["edge group", ">A", ">B", ">B − A"], differ.map((group) => [group, named(ours[group]), named(theirs[group]), change(group)]), `Bits differ in ${differ.length} of ${groups.length} groups of edges`);
    made.lastChild.classList.add("tall");
    bits.append(made);
  }
  body.push(element("div", { class: "columns even" }, costs, bits));
  $("compare-body").replaceChildren(...body);
}

// ---------------------------------------------------------------- the network
const BITS = [[3, "#c1292e", "3 or fewer"], [4, "#e2711d", "4"], [5, "#d9a514", "5"], [6, "#4f9d3a", "6"], [7, "#1f9e9e", "7"], [8, "#2f6fb7", "8"], [99, "#7d6bb3", "more"]];
const CAUSES = { inherited: "#8795a1", rounding: "#2f6fb7", constants: "#8e5bb5", saturation: "#e2711d", overflow: "#c1292e" };
const GREY = "#9aa5ae";
const bitsColour = (bits) => bits === null || bits === undefined ? GREY : BITS.find(([most]) => bits <= most)[1];
const LEGIBLE = 0.7;
let zoom = null;

function nodeBits(choice, drawing) {
  const point = pointOf(choice);
  if (point) return Object.fromEntries(point.nodes.map((node) => [node.name, node.bits]));
  // of a trial, from the groups that a node's edges belong to
  const found = {}, bits = bitsOf(choice) || {};
  const lower = (name, value) => { found[name] = Math.min(found[name] === undefined ? 99 : found[name], value); };
  for (const [group, value] of Object.entries(bits)) {
    const cut = group.lastIndexOf(":"), [node, slot] = [group.slice(0, cut), group.slice(cut + 1)];
    if (slot !== "out") lower(node, value);
    else for (const edge of drawing.edges) if (edge.source === node) lower(edge.target, value);
  }
  return found;
}
function edgeBits(choice) {
  const point = pointOf(choice), found = {};
  if (point) for (const node of point.nodes) for (const edge of node.edges) found[edge.edge] = edge;
  else Object.entries(bitsOf(choice) || {}).forEach(([group, bits]) => { found[group] = { bits, scale: null }; });
  return found;
}
const short = (text, most) => text.length > most ? `${text.slice(0, most - 1)}…` : text;

function renderNetwork() {
  const canvas = $("canvas");
  if (!canvas || state.a === null) return;
  const index = drawingOf(state.a), drawing = R.drawings[index], point = pointOf(state.a);
  for (const each of all("svg[data-drawing]", canvas)) each.toggleAttribute("hidden", Number(each.dataset.drawing) !== index);
  const picture = canvas.querySelector(`svg[data-drawing="${index}"]`);
  const details = point ? Object.fromEntries(point.nodes.map((node) => [node.name, node])) : {};
  const bits = nodeBits(state.a, drawing), edges = edgeBits(state.a), areLeftOut = bitsOf(state.a) === null;
  const cost = costNamed(state.cost);
  const most = largest(drawing.nodes.map((node) => details[node.name] ? (state.colour === "blame" ? details[node.name].blame : details[node.name].costs[state.cost]) || 0 : 0), 1e-30);
  drawing.nodes.forEach((node, i) => {
    const detail = details[node.name], group = picture.querySelector(`[data-node="${i}"]`);
    const value = bits[node.name];
    let colour = GREY, strength = 0.0, text = "";
    const runs = detail ? detail.runs : value === undefined ? "" : "integer";
    if (state.colour === "bits") {
      colour = bitsColour(value); strength = isMissing(value) ? 0 : 0.16;
      text = runs === "input" ? "input" : areLeftOut ? "bits left out" : isMissing(value) ? runs : `${value} bits`;
    } else if (state.colour === "cause") {
      const cause = detail && detail.cause;
      colour = cause ? CAUSES[cause] : GREY; strength = cause ? 0.16 : 0;
      text = cause || "";
    } else if (detail) {
      const part = (state.colour === "blame" ? detail.blame : detail.costs[state.cost]) || 0;
      colour = state.colour === "blame" ? "#d9480f" : "#0f766e"; strength = 0.6 * part / most;
      text = part ? (state.colour === "blame" ? percent(part) : amount(cost, part)) : "";
      if (!part) colour = GREY;
    }
    const strip = group.querySelector(".strip"), body = group.querySelector(".body");
    strip.style.fill = colour;
    strip.style.fillOpacity = state.colour === "blame" || state.colour === "cost" ? Math.max(0.15, strength / 0.6) : 1;
    let tint = group.querySelector(".tint");
    if (!tint) { tint = svg("rect", { class: "tint", width: drawing.node_width, height: drawing.node_height, rx: 6 }); body.after(tint); }
    tint.style.fill = colour;
    tint.style.fillOpacity = strength;
    group.classList.toggle("strong", strength > 0.25);
    group.querySelector(".what").textContent = text ? `${short(node.op, 24 - text.length)} · ${text}` : short(node.op, 27);
    group.classList.toggle("on", state.node === node.name);
  });
  for (const group of all("g.edge", picture)) {
    const { source, target, slots } = group.dataset;
    const edge = slots.split(",").map((slot) => edges[`${target}:${slot}`]).find((each) => each) || (pointOf(state.a) ? null : edges[`${source}:out`]);
    group.querySelector("text").textContent = edge ? (edge.scale ? `${edge.bits} · ${digits(edge.scale, 3)}` : String(edge.bits)) : "";
    group.classList.toggle("float", !edge && !areLeftOut);
    group.classList.toggle("on", state.node !== null && (source === state.node || target === state.node));
  }
  legend(most, cost, areLeftOut);
  const isFirst = zoom === null;
  if (isFirst) fit(false);
  resize();
  if (isFirst) canvas.scrollLeft = drawing.nodes[0].x * zoom - canvas.clientWidth / 2;
  const select = $("pick-node");
  if (select.dataset.drawing !== String(index)) {
    select.dataset.drawing = String(index);
    select.replaceChildren(element("option", { value: "" }, "choose a node"), ...drawing.nodes.map((node) => element("option", { value: node.name }, node.name)));
  }
  select.value = state.node || "";
  renderPanel();
}
function legend(most, cost, areLeftOut) {
  const entry = (colour, text) => { const swatch = element("i"); swatch.style.background = colour; return element("span", {}, swatch, text); };
  const entries = {
    bits: () => areLeftOut ? [entry(GREY, `bits of this trial are ${LEFT_OUT}`)] : ["Fewest bits of a node's operands:", ...BITS.map(([, colour, text]) => entry(colour, text)), entry(GREY, "float")],
    cause: () => ["Main cause of the error that a node adds:", ...Object.entries(CAUSES).filter(([name]) => name !== "inherited").map(([name, colour]) => entry(colour, name)), entry(GREY, "none")],
    blame: () => [entry("#d9480f", `part in the error of the outputs, estimated: the stronger, the more; the largest is ${percent(most)}`)],
    cost: () => [entry("#0f766e", `${cost.title} of a node: the stronger, the more; the largest is ${amount(cost, most)}`)],
  };
  $("legend").replaceChildren(...entries[state.colour]());
  if (!pointOf(state.a) && state.colour !== "bits") $("legend").append(` Of this trial only ${areLeftOut ? "costs" : "bits"} are there.`);
}
function fit(whole) {
  const canvas = $("canvas"), drawing = R.drawings[drawingOf(state.a)];
  const across = (canvas.clientWidth - 2) / drawing.width;
  // at first, names can be read, and a larger network is scrolled
  zoom = whole ? Math.min(across, (canvas.clientHeight - 2) / drawing.height, 1) : Math.max(0.8, Math.min(1, across));
}
function resize() {
  const drawing = R.drawings[drawingOf(state.a)], picture = $("canvas").querySelector(`svg[data-drawing="${drawingOf(state.a)}"]`);
  picture.setAttribute("width", Math.round(drawing.width * zoom));
  picture.setAttribute("height", Math.round(drawing.height * zoom));
}
function zoomBy(factor) {
  const canvas = $("canvas"), before = zoom;
  const middle = [(canvas.scrollLeft + canvas.clientWidth / 2) / before, (canvas.scrollTop + canvas.clientHeight / 2) / before];
  zoom = Math.min(3, Math.max(0.04, zoom * factor));
  resize();
  canvas.scrollTo(middle[0] * zoom - canvas.clientWidth / 2, middle[1] * zoom - canvas.clientHeight / 2);
}
function showNode(name, move) {
  state.node = name || null;
  if (move && state.node && zoom !== null && zoom < LEGIBLE) zoom = 0.8;
  renderNetwork();
  const drawing = R.drawings[drawingOf(state.a)], node = drawing.nodes.find((each) => each.name === state.node);
  if (node && move) $("canvas").scrollTo({ left: node.x * zoom - $("canvas").clientWidth / 2, top: node.y * zoom - $("canvas").clientHeight / 2 });
}

// ---------------------------------------------------------------- the page of a node
function renderPanel() {
  const panel = $("panel"), point = pointOf(state.a);
  const drawn = R.drawings[drawingOf(state.a)].nodes.find((node) => node.name === state.node);
  if (!drawn) { panel.replaceChildren(...overview(point)); return; }
  const head = [element("h3", {}, drawn.name), element("p", { class: "soft" }, `${drawn.op}, shape ${drawn.shape.length ? drawn.shape.join(" × ") : "of one number"}`)];
  const detail = point && point.nodes.find((node) => node.name === drawn.name);
  if (!detail) {
    const bits = bitsOf(state.a), own = Object.entries(bits || {}).filter(([group]) => group.slice(0, group.lastIndexOf(":")) === drawn.name);
    panel.replaceChildren(...head, own.length ? table(["edge group", ">bits"], own) : element("p", {}, bits ? "It has no bits of its own." : `Its bits are ${LEFT_OUT}.`), element("p", { class: "note" }, "More is there for the points that are shown in full."));
    return;
  }
  panel.replaceChildren(...head, ...errorPart(detail), ...valuePart(detail, point), ...accumulatorPart(detail), ...weightPart(detail), ...edgePart(detail), ...costPart(detail), ...sensitivityPart(detail));
  panel.scrollTop = 0;
}
function overview(point) {
  if (!point) return [element("p", { class: "note" }, "Choose a node.")];
  const blamed = point.nodes.filter((node) => node.blame).sort((x, y) => y.blame - x.blame).slice(0, 8);
  const risky = point.nodes.filter((node) => node.runs === "integer" && node.verdict !== "proved");
  const floats = point.nodes.filter((node) => node.runs === "float");
  const link = (node) => element("button", { type: "button", class: "link", onclick: () => showNode(node.name, true) }, node.name);
  const kept = point.remedies ? point.remedies.kept_float : {}, isTried = blamed.some((node) => node.name in kept);
  const body = [element("h3", {}, "Where to look")];
  if (blamed.length) body.push(element("h4", {}, `Most of the outputs' error comes from (estimated on ${point.inside_samples} samples)`), table(["node", ">blame", "main cause", ...(isTried ? [">kept float gains"] : [])], blamed.map((node) => [link(node), percent(node.blame), node.cause || "", ...(isTried ? [node.name in kept ? shift(kept[node.name], "sqnr") : "not tried"] : [])])));
  body.push(element("h4", {}, "Overflow"));
  body.push(risky.length ? table(["may overflow", ">largest sum", "register"], risky.map((node) => [link(node), node.share === null ? NONE : `${digits(node.share, 3)}× its maximum`, node.register || ""])) : element("p", {}, "It is proved absent at every integer node."));
  if (floats.length) body.push(element("h4", {}, `${floats.length} ${floats.length === 1 ? "node stays" : "nodes stay"} float`), table(["node", "why"], floats.slice(0, 12).map((node) => [link(node), node.reason])));
  if (floats.length > 12) body.push(element("p", { class: "soft" }, `and ${floats.length - 12} more, see the table of all nodes`));
  if (!blamed.length) body.push(element("p", { class: "soft" }, "Errors were not measured, since no data was given."));
  return body;
}
function errorPart(node) {
  const made = [element("h4", {}, "Error")];
  if (node.sqnr === null) { made.push(element("p", { class: "soft" }, "Not measured.")); return [...made, facts([["runs in", node.runs], ["because", node.reason]])]; }
  made.push(facts([["SQNR", decibels(node.sqnr, 1)], ["own error alone", node.own_sqnr === null || node.own_sqnr >= MOST_DB ? "none" : decibels(node.own_sqnr, 1)],
    ["blame", node.blame ? `${percent(node.blame)} of the outputs' error, estimated on ${pointOf(state.a).inside_samples} samples` : "none"], ["runs in", node.runs], ["because", node.reason],
    ["integers", node.runs === "integer" ? `${node.differing} of ${amount({ unit: "" }, node.compared)} values differ from the simulation` : ""]]));
  const causes = Object.entries(node.causes).sort((x, y) => y[1] - x[1]);
  if (causes.length) made.push(element("h4", {}, "What the node's own error comes from"), table(["cause", ">share", ""], causes.map(([name, share]) => {
    const bar = element("span", { class: "share" });
    bar.style.width = `${Math.max(0, Math.min(1, share)) * 90}px`;
    bar.style.background = CAUSES[name];
    return [name, percent(share), bar];
  })));
  if (causes.some(([, share]) => share < 0 || share > 1)) made.push(element("p", { class: "soft" }, "A share below zero means that this part of the error cancels others; those then add up to more than 100 %."));
  if (node.words) made.push(element("p", {}, `Mainly ${node.cause}: ${node.words}.`));
  const edge = node.edges.filter((each) => each.kind === "data" && each.effect).sort((x, y) => y.effect - x.effect)[0];
  if (edge && (node.cause === "rounding" || node.cause === "saturation"))
    made.push(element("p", { class: "soft" }, "What it reads is drawn on the page of ", element("button", { type: "button", class: "link", onclick: () => showNode(edge.source, true) }, edge.source), "."));
  const tried = pointOf(state.a).remedies, own = tried ? tried.found.filter((each) => each.node === node.name) : [];
  const impossible = tried && tried.impossible[node.name];
  if (own.length) made.push(element("p", {}, "Helps, as tried:"), table(["change", ">gain", ">bytes"], own.map((each) => [element("code", {}, each.command), decibels(each.gain_db), each.bytes])));
  else if (tried && tried.tried_for.includes(node.name)) made.push(element("p", { class: "soft" }, `Changes were tried for it on ${tried.samples} samples, and none helps.`));
  else if (node.helps) made.push(element("p", {}, element("b", {}, "May help: "), `${node.helps}.`));
  if (impossible && impossible.length) made.push(element("p", { class: "soft" }, `Not possible on this hardware: ${impossible.join("; ")}.`));
  return made;
}
// the ranges in which a node's value is quantized: at its output, or on the edges that read it
function limitsOf(node, point) {
  const edges = [...node.edges.filter((edge) => edge.kind === "output"), ...point.nodes.flatMap((other) => other.edges.filter((edge) => edge.source === node.name && edge.kind === "data" && edge.converted))];
  const found = new Map();
  for (const edge of edges) {
    const same = `${edge.low} ${edge.high} ${edge.bits}`;
    if (found.has(same)) found.get(same).edges.push(edge.edge);
    else found.set(same, { ...edge, edges: [edge.edge] });
  }
  return [...found.values()];
}
function valuePart(node, point) {
  if (node.histogram === null) return [];
  const { low, high, counts } = R.histograms[node.histogram], limits = limitsOf(node, point);
  const [width, height, bottom] = [360, 150, 24];
  const made = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Histogram of the values of ${node.name}` });
  const at = (value) => 6 + (width - 12) * (value - low) / (high - low), step = (high - low) / counts.length;
  const tallest = Math.log1p(largest(counts));
  const kept = limits.length ? [largest(limits.map((each) => each.low)), least(limits.map((each) => each.high))] : [-Infinity, Infinity];
  counts.forEach((count, i) => {
    if (!count) return;
    const [from, to] = [low + i * step, low + (i + 1) * step], size = (height - bottom - 14) * Math.log1p(count) / tallest;
    made.append(svg("rect", { class: to <= kept[0] || from >= kept[1] ? "cut" : "v", x: at(from) + 0.4, width: Math.max(0.6, at(to) - at(from) - 0.8), y: height - bottom - size, height: size }));
  });
  made.append(svg("line", { class: "axis", x1: 6, x2: width - 6, y1: height - bottom, y2: height - bottom }), svg("text", { x: 6, y: height - 8 }, digits(low)), svg("text", { x: width - 6, y: height - 8, "text-anchor": "end" }, digits(high)));
  if (low < 0 && high > 0 && at(0) > 60 && at(0) < width - 60) made.append(svg("text", { x: at(0), y: height - 8, "text-anchor": "middle" }, "0"));
  for (const each of limits) for (const end of [each.low, each.high]) if (end > low && end < high) made.append(svg("line", { class: "limit", x1: at(end), x2: at(end), y1: 4, y2: height - bottom }));
  const beyond = (each) => {
    const most = Math.max(each.high > 0 ? high / each.high : 0, each.low < 0 ? low / each.low : 0);
    return most > 1 ? `${digits(most, 3)}× the end` : "none";
  };
  const rows = limits.map((each) => [each.edges.length > 2 ? `${each.edges[0]} and ${each.edges.length - 1} more` : each.edges.join(", "), each.bits, `${digits(each.low)} to ${digits(each.high)}`, each.clipped === null ? NONE : percent(each.clipped, 3), beyond(each)]);
  const bins = counts.map((count, i) => [`${digits(low + i * step, 3)} to ${digits(low + (i + 1) * step, 3)}`, count]);
  return [element("h4", {}, "Its values in the float model"), element("figure", { class: "chart" }, made),
    element("p", { class: "soft" }, limits.length ? "Heights are logarithms of counts. Dashed lines are the ends of the range that its integers reach, where values lie beyond; red bins are clipped." : "Heights are logarithms of counts. Readers take the values as the node emits them, so nothing is clipped here."),
    ...(limits.length ? [table(["quantized on", ">bits", ">range", ">clipped", ">farthest beyond"], rows)] : []),
    element("details", {}, element("summary", {}, "Counts as a table"), table(["values", ">count"], bins))];
}
function accumulatorPart(node) {
  if (node.runs !== "integer") return [];
  if (node.share === null) return [element("h4", {}, "Accumulator"), element("p", {}, "It adds up nothing, so nothing can overflow.")];
  const room = -Math.log2(node.share), [width, height] = [360, 34];
  const made = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "The largest sum against the register" });
  const most = Math.max(1, node.share), at = (value) => 2 + (width - 4) * value / most;
  made.append(svg("rect", { x: 2, y: 4, width: width - 4, height: 12, rx: 3, class: "v" }), svg("rect", { x: 2, y: 4, width: Math.max(2, at(node.share) - 2), height: 12, rx: 3, class: node.share > 1 ? "cut" : "" }));
  made.lastChild.style.fill = node.share > 1 ? "" : "#2f6fb7";
  made.firstChild.style.fillOpacity = 0.25;
  made.append(svg("text", { x: 2, y: 30 }, "0"), svg("text", { x: at(1), y: 30, "text-anchor": "end" }, `largest ${node.register}`));
  const verdict = { proved: "proved absent for any input", possible: "possible for other inputs; none was seen", overflows: `seen: ${node.overflows} of ${amount({ unit: "" }, node.accumulators)} sums` }[node.verdict];
  return [element("h4", {}, "Accumulator"), element("figure", { class: "chart" }, made), facts([["overflow", verdict], ["largest sum", `${percent(node.share, 2)} of the largest ${node.register}, for any input`],
    ["headroom", `${room >= 0 ? "" : "lacks "}${fixed(Math.abs(room), 1)} bits`], ["largest seen", node.seen === null ? "" : `${percent(node.seen, 2)} of the largest ${node.register}`], ["past its range", node.on_overflow], ["signature", node.signature]])];
}
function weightPart(node) {
  if (node.weights === null) return [];
  const weights = R.channels[node.weights], edge = node.edges.find((each) => each.kind === "weight");
  const [width, height] = [360, 130], ends = [least(weights.low, 0), largest(weights.high, 0)];
  const at = (value) => height - 8 - (height - 16) * (value - ends[0]) / (ends[1] - ends[0] || 1), left = 46, step = (width - left - 4) / weights.low.length;
  const made = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Ranges of the channels of ${weights.weight}` });
  weights.low.forEach((low, i) => made.append(svg("rect", { class: "v", x: left + i * step + step * 0.12, width: Math.max(0.8, step * 0.76), y: at(weights.high[i]), height: Math.max(0.8, at(low) - at(weights.high[i])) })));
  made.append(svg("line", { class: "axis", x1: left, x2: width - 4, y1: at(0), y2: at(0) }));
  if (edge) for (const end of [edge.low, edge.high]) if (end >= ends[0] && end <= ends[1]) made.append(svg("line", { class: "limit", x1: left, x2: width - 4, y1: at(end), y2: at(end) }));
  made.append(svg("text", { x: left - 6, y: 13, "text-anchor": "end" }, digits(ends[1], 3)), svg("text", { x: left - 6, y: height - 5, "text-anchor": "end" }, digits(ends[0], 3)));
  const named = (i) => weights.together > 1 ? `${i * weights.together} to ${Math.min(weights.channels, (i + 1) * weights.together) - 1}` : String(i);
  const narrow = weights.low.map((low, i) => Math.max(-low, weights.high[i])), widest = largest(narrow);
  const spread = widest / least(narrow.filter((each) => each > 0), widest || 1);
  return [element("h4", {}, "Ranges of its weights, by channel"), element("figure", { class: "chart" }, made),
    element("p", { class: "soft" }, `${weights.channels} output channels of ${weights.weight}${weights.together > 1 ? `, ${weights.together} to a bar` : ""}; the widest is ${digits(spread, 3)} times the narrowest.${edge ? ` ${edge.bits} bits with ${edge.scales === 1 ? "one scale for all" : `${edge.scales} scales`}.` : ""}`),
    element("details", {}, element("summary", {}, "Ranges as a table"), table(["channel", ">low", ">high"], weights.low.map((low, i) => [named(i), digits(low, 3), digits(weights.high[i], 3)])))];
}
function edgePart(node) {
  if (!node.edges.length) return [];
  return [element("h4", {}, "Its edges"), table(["edge", ">bits", "dtype", ">scale", ">clipped"], node.edges.map((edge) => [`${edge.edge.slice(edge.edge.lastIndexOf(":") + 1)}: ${edge.kind}${edge.kind === "output" ? "" : ` ${edge.source}`}${edge.converted ? "" : " (as emitted)"}`, edge.bits, edge.dtype, `${digits(edge.scale)}${edge.scales > 1 ? ` at most, ${edge.scales}` : ""}`, edge.clipped === null ? "" : percent(edge.clipped, 3)]))];
}
function costPart(node) {
  const names = R.costs.filter((cost) => node.costs[cost.name]);
  return names.length ? [element("h4", {}, "Its costs"), table(["cost", ">of one sample"], names.map((cost) => [cost.title, amount(cost, node.costs[cost.name])]))] : [];
}
function sensitivityPart(node) {
  if (!R.sensitivities) return [];
  const own = Object.entries(R.sensitivities).filter(([group]) => group.slice(0, group.lastIndexOf(":")) === node.name);
  if (!own.length) return [];
  const bits = [...new Set(own.flatMap(([, losses]) => Object.keys(losses)))].map(Number).sort((x, y) => y - x);
  return [element("h4", {}, "Expected loss of every choice of bits"), table(["edge group", ...bits.map((each) => `>${each}`)], own.map(([group, losses]) => [group, ...bits.map((each) => losses[each] === undefined ? "" : digits(losses[each], 3))]))];
}

// ---------------------------------------------------------------- wiring
function start() {
  const first = R.shown !== null ? { point: R.shown } : T && T.best !== null ? choiceOfTrial(T.best) : T && T.value.length ? choiceOfTrial(0) : null;
  options($("pick-a"), first, null);
  options($("pick-b"), null, "nothing");
  $("bar").querySelector(".picks").hidden = first === null;
  $("pick-a").addEventListener("change", (event) => choose(choiceOf(event.target.value)));
  $("pick-b").addEventListener("change", (event) => compareWith(choiceOf(event.target.value)));
  for (const button of all("[data-trial]")) if (button.tagName === "BUTTON") button.addEventListener("click", () => { choose(choiceOfTrial(Number(button.dataset.trial))); });
  for (const button of all("[data-go]")) button.addEventListener("click", () => {
    showNode(R.drawings[drawingOf(state.a)].nodes[Number(button.dataset.go)].name, true);
    $("network").scrollIntoView();
  });
  for (const button of all("[data-copy]")) button.addEventListener("click", () => {
    const done = () => { button.textContent = "Copied"; setTimeout(() => { button.textContent = "Copy"; }, 1500); };
    const select = () => { const range = document.createRange(); range.selectNodeContents(button.parentElement.querySelector("code")); getSelection().removeAllRanges(); getSelection().addRange(range); };
    if (navigator.clipboard) navigator.clipboard.writeText(button.dataset.copy).then(done, select);
    else select();
  });
  if ($("front-cost")) $("front-cost").addEventListener("change", (event) => { state.front = event.target.value; drawFront(); markPlots(); });
  if ($("canvas")) wireNetwork();
  drawFront();
  drawSearch();
  state.a = first;
  render();
  let timer = null;
  addEventListener("resize", () => { clearTimeout(timer); timer = setTimeout(() => { drawFront(); drawSearch(); markPlots(); }, 120); });
}
function wireNetwork() {
  const names = [...new Set(R.points.flatMap((point) => point.nodes.flatMap((node) => Object.keys(node.costs))))];
  const costs = R.costs.filter((cost) => names.includes(cost.name));
  state.cost = costs.length ? (costs.find((cost) => cost.name === "weight_bytes") || costs[0]).name : null;
  $("node-cost").replaceChildren(...costs.map((cost) => element("option", { value: cost.name }, cost.title)));
  if (state.cost) $("node-cost").value = state.cost;
  $("node-cost").addEventListener("change", (event) => { state.cost = event.target.value; renderNetwork(); });
  for (const input of all("input[name=colour]")) input.addEventListener("change", () => {
    state.colour = input.value;
    $("node-cost-label").hidden = input.value !== "cost";
    renderNetwork();
  });
  $("pick-node").addEventListener("change", (event) => showNode(event.target.value, true));
  $("zoom-in").addEventListener("click", () => zoomBy(1.25));
  $("zoom-out").addEventListener("click", () => zoomBy(0.8));
  $("zoom-fit").addEventListener("click", () => { fit(true); renderNetwork(); });
  $("canvas").addEventListener("click", (event) => {
    const group = event.target.closest("g.node");
    if (!group) return;
    showNode(R.drawings[drawingOf(state.a)].nodes[Number(group.dataset.node)].name, false);
    // where the page of the node stands below the drawing
    if ($("panel").offsetTop > $("canvas").offsetTop) $("panel").scrollIntoView({ behavior: "smooth" });
  });
  $("canvas").addEventListener("keydown", (event) => {
    const nodes = R.drawings[drawingOf(state.a)].nodes, here = nodes.findIndex((node) => node.name === state.node);
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    showNode(nodes[Math.min(nodes.length - 1, Math.max(0, here + step))].name, true);
    event.preventDefault();
  });
}
start();
})();
