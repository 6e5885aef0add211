/** What the server tells of its model and of how it does. Whatever it does not tell is left out. */
import { byId, element } from "./dom.js";
import { count } from "./view.js";

const sum = (metrics, name) => metrics.get(name)?.reduce((total, { value }) => total + value, 0);

/**
 * How fast decoding reads memory: {share: of the ceiling that was measured, 0 to 1, gbPerS, stepBytes}; since the
 * metrics `before`, or in the last launch.
 */
export function speedOf(metrics, before) {
  const of = (name) => sum(metrics, `cheetah:${name}`),
    since = (name) => of(name) - (before && sum(before, `cheetah:${name}`));
  const latest = of("decode_gb_per_second"),
    mean = since("decode_bytes_total") / since("decode_seconds_total") / 1e9;
  const gbPerS = latest !== undefined && mean > 0 && mean < Infinity ? mean : latest;
  return { share: gbPerS / of("read_ceiling_gb_per_second"), gbPerS, stepBytes: of("decode_bytes_per_step") };
}

/** Bytes of the device's memory that are taken. */
export const memoryOf = (metrics) => sum(metrics, "cheetah:device_memory_bytes");

/** Bytes, with three digits. */
export function size(bytes) {
  const power = bytes < 1 ? 0 : Math.min(4, Math.floor(Math.log10(bytes) / 3));
  return `${Number((bytes / 1000 ** power).toPrecision(3))} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}

const percent = (part) => `${(100 * part).toFixed(part < 0.1 ? 1 : 0)} %`;

/** Fills the dialog. */
export function showFacts({ model, metrics, version }) {
  const { share, gbPerS, stepBytes } = speedOf(metrics),
    of = (name) => sum(metrics, `vllm:${name}`);
  const memory = metrics.get("cheetah:device_memory_bytes") ?? [],
    asked = of("prefix_cache_queries_total");
  const first = of("time_to_first_token_seconds_sum") / of("time_to_first_token_seconds_count");
  byId("about-name").textContent = model.id;
  byId("facts").replaceChildren(
    ...group("", [
      ["Context", `${count(model.max_model_len)} tokens`],
      ["Cheetah", version],
    ]),
    ...group("Speed", [
      ["Of the measured read ceiling", share > 0 && percent(share)],
      ["Read from memory", gbPerS > 0 && `${count(Math.round(gbPerS))} GB/s`],
      ["A step reads", stepBytes > 0 && size(stepBytes)],
      [
        "To the first token, on average",
        first > 0 && (first < 1 ? `${(1000 * first).toFixed(0)} ms` : `${first.toFixed(1)} s`),
      ],
    ]),
    ...group("Now", [
      ["Answers being made", told(of("num_requests_running"), count)],
      ["Waiting in line", told(of("num_requests_waiting"), count)],
      ["Cache of keys and values in use", told(of("kv_cache_usage_perc"), percent)],
      ["Tokens of prompts found in the cache", asked > 0 && percent(of("prefix_cache_hits_total") / asked)],
      ["Tokens made so far", told(of("generation_tokens_total"), count)],
    ]),
    ...group("Memory of the device", [
      ...memory.filter(({ value }) => value).map(({ labels, value }) => [labels.part, size(value)]),
      ["in all", memory.length && size(memoryOf(metrics))],
    ]),
  );
}

const told = (value, as) => value !== undefined && as(value);

function group(name, facts) {
  const rows = facts
    .filter(([, value]) => value)
    .flatMap(([fact, value]) => [element("dt", {}, fact), element("dd", {}, value)]);
  return rows.length ? [name && element("h3", {}, name), element("dl", {}, ...rows)].filter(Boolean) : [];
}
