// The page of a running Readyplane: reads /v1/state once, then /v1/stream after every tick.
// Everything shown is text that was set as text; nothing of a response is ever markup.
import { drawLines, drawSteps } from "./charts.js";

const POINTS_MAX = 900;
const RETRY_AFTER_MS = 2000;
const SEGMENT_COLOURS = {
  schedule: "#98a2b3", image: "#b8c0cc", runtime_import: "#5b8def", artifact_discovery: "#36bffa",
  arena_prefault: "#a6f4c5", weight_read: "#12b76a", weight_transfer: "#0e9f6e", weight_deserialize: "#6ce9a6",
  host_to_device: "#66c61c", parallel_init: "#f7b27a", compile: "#f79009", cuda_graph: "#ef6820",
  kv_profile: "#ee46bc", warmup: "#dd2590", verify: "#7a5af8", group_barrier: "#9b8afb",
  canary: "#d92d20", router_registration: "#344054",
};
const token = new URLSearchParams(location.hash.slice(1)).get("token");
const headers = token ? { authorization: `Bearer ${token}` } : {};
const byId = (id) => document.getElementById(id);
const history = { t: [], prefill: emptyPool(), decode: emptyPool(), ttft: [[], []], tpot: [[], []] };

function emptyPool() {
  return { desired: [], provisioned: [], ready: [], load: [] };
}

const known = (value) => value !== null && value !== undefined;
const shown = (value, digits = 2, unit = "") => (known(value) ? `${Number(value).toFixed(digits)}${unit}` : "–");
const whole = (value) => (known(value) ? Math.round(value).toLocaleString("en") : "–");
const share = (value) => (known(value) ? `${(100 * value).toFixed(0)} %` : "–");

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "style") Object.assign(made.style, value);
    else made.setAttribute(key, value);
  }
  made.append(...children.filter(known));
  return made;
}

async function start() {
  for (;;) {
    try {
      await follow();
      live(false, "connection closed; trying again");
    } catch (error) {
      live(false, `not connected: ${error.message}; trying again`);
    }
    await new Promise((done) => setTimeout(done, RETRY_AFTER_MS));
  }
}

async function follow() {
  const first = await fetch("/v1/state", { headers });
  if (first.status === 401) throw new Error("the address lacks its token (#token=…)");
  if (!first.ok) throw new Error(`the planner answered ${first.status}`);
  const state = await first.json();
  restore(state.history);
  render(state);
  const stream = await fetch("/v1/stream", { headers });
  if (!stream.ok) throw new Error(`the planner answered ${stream.status}`);
  const reader = stream.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split(/\r?\n/).filter((l) => l.startsWith("data:")).map((l) => l.slice(5)).join("\n");
      if (data) take(JSON.parse(data));
    }
  }
}

function take(state) {
  remember(state);
  render(state);
}

function restore(past) {
  if (!past) return;
  history.t = [...past.t_s];
  for (const pool of ["prefill", "decode"]) {
    for (const key of Object.keys(history[pool])) history[pool][key] = [...past[pool][key]];
  }
  history.ttft = [[...past.ttft_actual_p90_s], [...past.ttft_predicted_s]];
  history.tpot = [[...past.tpot_actual_p90_s], [...past.tpot_predicted_s]];
}

function remember(state) {
  if (history.t.length && state.now_s <= history.t[history.t.length - 1]) return;
  const push = (list, value) => { list.push(known(value) ? value : null); };
  push(history.t, state.now_s);
  for (const pool of ["prefill", "decode"]) {
    for (const key of Object.keys(history[pool])) push(history[pool][key], state.pools[pool][key]);
  }
  for (const name of ["ttft", "tpot"]) {
    const { actual, predicted } = state.latency[name];
    push(history[name][0], actual.count ? actual.p90_s : null);
    push(history[name][1], predicted.count ? predicted.p90_s ?? predicted.p50_s : null);
  }
  const lists = [history.t, ...history.ttft, ...history.tpot, ...Object.values(history.prefill),
    ...Object.values(history.decode)];
  if (history.t.length > POINTS_MAX) for (const list of lists) list.splice(0, list.length - POINTS_MAX);
}

function live(yes, text) {
  byId("live").dataset.live = yes ? "yes" : "no";
  byId("live").textContent = text;
}

function render(state) {
  live(true, `live · ${new Date(1000 * state.now_s).toLocaleTimeString()}`);
  byId("model").textContent = state.model ? `model ${state.model}` : "";
  byId("slo").textContent = `SLO: TTFT ≤ ${state.slo.ttft_s} s, TPOT ≤ ${Math.round(1000 * state.slo.tpot_s)} ms`;
  const c = state.counters;
  byId("counters").textContent = `${whole(c.arrivals)} arrived · ${whole(c.finished)} finished · ` +
    `attainment ${c.finished + c.refused + c.aborted > 0 ? share(c.attained / (c.finished + c.refused + c.aborted)) : "–"} · ` +
    `${whole(c.refused)} refused · ${whole(c.handovers)} hand-overs`;
  notices(state);
  for (const name of ["prefill", "decode"]) pool(name, state.pools[name], state);
  charts(state);
  workers(state.workers);
  decisions(state.decisions);
}

function notices(state) {
  const texts = [];
  if (state.degraded) texts.push(`Degraded: ${state.degraded}`);
  if (state.paused) texts.push("Paused: targets are held where they are.");
  if (known(state.lateness_p99_s) && state.lateness_p99_s > 0.02) {
    texts.push(`Modelled engines run ${Math.round(1000 * state.lateness_p99_s)} ms late (P99): attainment is void.`);
  }
  byId("notices").replaceChildren(...texts.map((text) => element("p", {}, text)));
}

function pool(name, facts, state) {
  const three = element("div", { class: "three" },
    ...["desired", "provisioned", "ready"].map((key) => element("div", { class: key },
      element("b", { "data-value": `${name}-${key}` }, whole(facts[key])), key,
      element("div", { class: "quiet" }, `${whole(facts[`${key}_rate`])} tokens/s`))));
  const load = facts.load;
  const fill = element("div", { class: known(load) && load > 1 ? "fill over" : "fill",
    style: { width: `${Math.min(100, 50 * (load ?? 0))}%` } });
  const between = known(facts.load_low) && known(facts.load_high)
    ? ` (${shown(facts.load_low)} to ${shown(facts.load_high)})` : "";
  const bar = element("div", { class: "load" },
    element("div", {}, `Load_${name === "prefill" ? "P" : "D"} ${shown(load)}${between}`),
    element("div", { class: "bar" }, fill, element("div", { class: "mark", style: { left: "50%" } })));
  const unit = name === "prefill" ? [1, " s", 2] : [1000, " ms", 0];
  const latency = (value) => (known(value) ? shown(unit[0] * value, unit[2], unit[1]) : "–");
  const rows = [
    [name === "prefill" ? "TTFT actual" : "TPOT actual", latency(facts.actual_s)],
    ["predicted", latency(facts.predicted_s)],
    ["target", latency(facts.target_s)],
    ["queued tokens", whole(facts.queue_tokens)],
    ["active", whole(facts.active)],
    ["KV used", share(facts.kv_usage)],
    ["draining", whole(facts.draining)],
    ["missing", `${whole(facts.gap_rate)} tokens/s`],
    ["next arrival", known(facts.next_arrival_s) ? `in ${shown(facts.next_arrival_s, 1)} s` : "none pending"],
    ["T_ready P50 / P90", `${shown(facts.t_ready_p50_s, 1)} / ${shown(facts.t_ready_p90_s, 1)} s`],
  ];
  const list = element("dl", { class: "facts" }, ...rows.map(([key, value]) =>
    element("div", {}, element("dt", {}, key), element("dd", {}, value))));
  const title = element("h3", {},
    element("span", { class: "dot", style: { background: `var(--${name})` } }),
    name === "prefill" ? "Prefill" : "Decode");
  byId(`pool-${name}`).replaceChildren(title, three, bar, list);
}

function charts(state) {
  for (const name of ["prefill", "decode"]) {
    drawSteps(byId(`chart-${name}`), history.t, [
      { name: "desired", values: history[name].desired, colour: "var(--desired)", dash: "5 3" },
      { name: "provisioned", values: history[name].provisioned, colour: "var(--provisioned)" },
      { name: "ready", values: history[name].ready, colour: "var(--ready)" },
    ]);
  }
  drawLines(byId("chart-load"), history.t, [
    { name: "Load_P", values: history.prefill.load, colour: "var(--prefill)" },
    { name: "Load_D", values: history.decode.load, colour: "var(--decode)" },
  ], { target: 1, most: 3 });
  for (const [name, factor] of [["ttft", 1], ["tpot", 1000]]) {
    const times = (list) => list.map((v) => (known(v) ? factor * v : null));
    drawLines(byId(`chart-${name}`), history.t, [
      { name: "actual", values: times(history[name][0]), colour: "var(--ready)" },
      { name: "predicted", values: times(history[name][1]), colour: "var(--provisioned)", dash: "5 3" },
    ], { target: factor * state.slo[`${name}_s`], most: 3 * factor * state.slo[`${name}_s`] });
  }
}

function workers(list) {
  const body = document.querySelector("#workers tbody");
  body.replaceChildren(...list.map((worker) => element("tr", { "data-worker": worker.worker_id },
    element("td", {}, element("code", {}, worker.worker_id)),
    element("td", {}, worker.convertible ? `${worker.role}+prefill` : worker.role),
    element("td", {}, element("span", { class: `state ${worker.state}` }, worker.state),
      worker.drain_reason ? element("div", { class: "quiet" }, worker.drain_reason) : null,
      known(worker.unheard_s)
        ? element("div", { class: "blocked" }, `nothing heard of it for ${shown(worker.unheard_s, 0)} s; its process runs`)
        : null),
    element("td", {}, whole(worker.active)),
    element("td", {}, share(worker.kv_usage)),
    element("td", {}, ...startUp(worker)),
    element("td", {}, known(worker.start?.wall_s) ? shown(worker.start.wall_s, 1, " s") : "–"),
    element("td", {}, element("code", {}, worker.scale_decision_id || "manual")))));
}

function startUp(worker) {
  const start = worker.start;
  if (!start || !start.segments?.length) return [element("span", { class: "quiet" }, "ordered; no news yet")];
  const wall = Math.max(start.wall_s || 0, 0.001);
  const segments = Object.entries(start.exclusive_s || {});
  const facts = new Map(start.segments.map((s) => [s.name, s]));
  const bar = element("div", { class: "phases" }, ...segments.map(([name, seconds]) => {
    const fact = facts.get(name);
    const running = fact && !known(fact.end_s);
    return element("span", {
      class: [fact?.modelled ? "modelled" : "", running ? "running" : ""].join(" "),
      style: { width: `${(100 * seconds) / wall}%`, backgroundColor: SEGMENT_COLOURS[name] || "#667085" },
      title: `${name} ${seconds.toFixed(2)} s${fact?.modelled ? " (modelled)" : ""} ${fact?.detail || ""}`,
    });
  }));
  const more = [bar];
  const starting = worker.state === "provisioned" || worker.state === "ordered";
  if (start.failure) more.push(element("p", { class: "blocked" }, `failed: ${start.failure}`));
  else if (starting && start.blocking_segment) {
    more.push(element("p", { class: "blocked" }, `in ${start.blocking_segment} for ${shown(blockedFor(start), 1)} s`));
  }
  if ((starting || start.failure) && start.log_tail) more.push(element("pre", {}, start.log_tail));
  const failed = (worker.checks || []).filter((check) => !check.passed);
  if (failed.length) {
    more.push(element("p", { class: "blocked" }, failed.map((c) => `${c.name}: ${c.reason}`).join("; ")));
  }
  return more;
}

function blockedFor(start) {
  const running = start.segments.filter((s) => s.name === start.blocking_segment && !known(s.end_s));
  return running.length ? Math.max(0, start.wall_s - running[0].start_s) : null;
}

function decisions(list) {
  byId("decisions").replaceChildren(...list.map((decision) => element("li", {},
    element("div", {}, element("span", { class: "quiet" }, new Date(1000 * decision.at_s).toLocaleTimeString()),
      " ", element("code", {}, decision.decision_id), " ", element("b", {}, decision.summary)),
    element("ul", { class: "reasons" }, ...decision.reasons.map((reason) =>
      element("li", { title: reason.code }, reason.text))))));
}

byId("segments-legend").replaceChildren(...Object.entries(SEGMENT_COLOURS).map(([name, colour]) =>
  element("span", {}, element("i", { style: { background: colour } }), name)),
  element("span", {}, "striped = modelled, not executed"));
start();
