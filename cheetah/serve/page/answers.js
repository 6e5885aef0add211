/** From a talk to a request, and from the chunks of an answer to a message. */
import { requestFields } from "./settings.js";
import { parts } from "./talks.js";

/** The body that asks for what comes behind the message of id `last`; goesOn: for the rest of that message. */
export function requestOf(talk, last, { model, goesOn }) {
  const { system, ...rest } = talk.settings;
  const messages = talk.path(last).map((message) => asSent(message, goesOn));
  if (system) messages.unshift({ role: "system", content: system });
  const going = goesOn ? { continue_final_message: true, add_generation_prompt: false } : {};
  return { model: model?.id, messages, ...requestFields(rest), ...going };
}

/** A message as the server takes it: without thoughts, which models are not shown again. */
function asSent(message, goesOn) {
  const { role, content, calls, tool_call_id } = message;
  if (role !== "assistant") return { role, content, tool_call_id };
  const answer = goesOn ? content : parts(message).answer;
  return { role, content: answer || (calls ? null : ""), tool_calls: calls };
}

/** Takes an answer into `message` as it comes. changed(): called whenever there is more of it. */
export async function take(message, chunks, changed) {
  const began = performance.now();
  let first, firstTokens, latest;
  for await (const {
    choices: [choice],
    usage,
  } of chunks) {
    const now = performance.now(),
      delta = choice?.delta ?? {},
      thought = delta.reasoning ?? delta.reasoning_content;
    if (thought) message.reasoning = (message.reasoning ?? "") + thought;
    if (delta.content) message.content += delta.content;
    if (delta.tool_calls)
      message.calls = [...(message.calls ?? []), ...delta.tool_calls.map(({ index, ...call }) => call)];
    if (choice?.finish_reason) message.end = choice.finish_reason === "length" ? "length" : "stop";
    else if (choice) latest = now;
    if (usage) {
      first ??= now;
      firstTokens ??= usage.completion_tokens;
      message.stats = { firstMs: first - began, tokens: usage.completion_tokens, prompt: usage.prompt_tokens };
      if (latest > first) message.stats.rate = (1000 * (usage.completion_tokens - firstTokens)) / (latest - first);
    }
    const { thoughts, answer } = parts(message);
    if (thoughts && answer) message.thoughtMs ??= now - first;
    changed();
  }
}
