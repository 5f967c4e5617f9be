// Small time charts in SVG: step lines for counts, lines for measures. A gap is drawn as a gap:
// what is not known is never drawn as zero.
const WIDTH_MIN = 300;
const HEIGHT = 150;
const LEFT = 34;
const RIGHT = 8;
const TOP = 16;
const BOTTOM = 18;
const SVG = "http://www.w3.org/2000/svg";

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

function node(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Lines that jump: worker counts. series: [{name, values, colour, dash}], one value per time.
export function drawSteps(svg, times, series) {
  draw(svg, times, series, { step: true, whole: true });
}

// Lines between points. target: a dashed line; most: the axis ends here at the latest.
export function drawLines(svg, times, series, { target, most } = {}) {
  draw(svg, times, series, { target, most });
}

function draw(svg, times, series, { step = false, whole = false, target, most } = {}) {
  const width = Math.max(WIDTH_MIN, svg.clientWidth);
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  const all = series.flatMap((s) => s.values.filter(known));
  let top = Math.max(...all, target !== undefined ? 1.25 * target : 0, whole ? 2 : 0);
  if (most !== undefined) top = Math.min(top, most);
  if (!(top > 0)) top = 1;
  if (whole) top = Math.ceil(top);
  const last = times[times.length - 1] ?? 0;
  const span = Math.max(30, last - (times[0] ?? 0));
  const begin = last - span;
  const x = (t) => LEFT + ((t - begin) / span) * (width - LEFT - RIGHT);
  const y = (v) => HEIGHT - BOTTOM - (Math.min(v, top) / top) * (HEIGHT - TOP - BOTTOM);
  const parts = [];
  for (const share of whole ? range(top) : [0, 0.5, 1]) {
    const value = whole ? share : share * top;
    parts.push(node("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
    parts.push(node("text", { x: LEFT - 5, y: y(value) + 4, "text-anchor": "end" }, label(value)));
  }
  if (target !== undefined && target <= top) {
    parts.push(node("line", { class: "target", x1: LEFT, x2: width - RIGHT, y1: y(target), y2: y(target) }));
  }
  parts.push(node("text", { x: LEFT, y: HEIGHT - 4 }, `${Math.round(span)} s ago`));
  parts.push(node("text", { x: width - RIGHT, y: HEIGHT - 4, "text-anchor": "end" }, "now"));
  let at = LEFT + 4;
  for (const line of series) {
    const d = path(times, line.values, x, y, step);
    const attributes = { d, style: `stroke: ${line.colour}`, "data-series": line.name };
    if (line.dash) attributes["stroke-dasharray"] = line.dash;
    if (d) parts.push(node("path", attributes));
    parts.push(node("text", { x: at, y: 11, style: `fill: ${line.colour}` }, line.name));
    at += 7 * line.name.length + 16;
  }
  svg.replaceChildren(...parts);
}

function path(times, values, x, y, step) {
  let d = "";
  let open = false;
  values.forEach((value, i) => {
    if (!known(value)) { open = false; return; }
    const [px, py] = [x(times[i]).toFixed(1), y(value).toFixed(1)];
    d += !open ? `M${px} ${py}` : step ? `H${px}V${py}` : `L${px} ${py}`;
    open = true;
  });
  return d;
}

function range(top) {
  const every = Math.ceil(top / 6);
  return Array.from({ length: Math.floor(top / every) + 1 }, (_, i) => i * every);
}

function label(value) {
  return value >= 100 ? Math.round(value) : Number(value.toPrecision(2));
}
