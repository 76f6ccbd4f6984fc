import { chat } from "./stream.js";
import { draw } from "./chart.js";

const at = (id) => document.getElementById(id);
const messages = [];
let running = null; // the AbortController of what runs
let plainSpeed = 0;

function turn(kind, title) {
  const box = document.createElement("article");
  box.className = `turn ${kind}`;
  if (title) {
    const head = document.createElement("h2");
    head.textContent = title;
    box.append(head);
  }
  at("talk").append(box);
  return box;
}

function showTokens(box, tokens) {
  for (const { text, origin } of tokens) {
    if (!text) continue;
    const span = document.createElement("span");
    span.className = `token ${origin}`;
    span.textContent = text;
    span.title = { a: "accepted", r: "recovered", b: "bonus" }[origin];
    box.append(span);
  }
  at("talk").scrollTop = at("talk").scrollHeight;
}

function figures(live, drafted) {
  const number = (value, digits) => (Number.isFinite(value) ? value.toFixed(digits) : "–");
  if (!drafted) {
    plainSpeed = live.tokens_per_s;
    at("plain").textContent = number(plainSpeed, 1);
  } else {
    at("mean").textContent = number(live.mean_emitted, 2);
    at("rate").textContent = live.levels === undefined || live.levels ? number(live.accept_rate, 2) : "–";
    at("speed").textContent = number(live.tokens_per_s, 1);
  }
  const speed = parseFloat(at("speed").textContent);
  at("gain").textContent = plainSpeed && speed ? `${(speed / plainSpeed).toFixed(2)}×` : "–";
}

// Ask once; colour tokens as they come. Resolves to the text.
async function answer(drafted, title) {
  const box = turn("assistant", title);
  const body = {
    messages, stream: true, stream_options: { include_usage: true },
    temperature: Number(at("temperature").value), max_tokens: Number(at("tokens").value), seed: 1,
    foredraft: { trace: true, budget: drafted ? "auto" : 0 },
  };
  let text = "", tokens = 0, steps = 0, first = 0;
  try {
    for await (const chunk of chat(body, at("key").value, running.signal)) {
      if (chunk.metrics) {
        const done = chunk.metrics.foredraft;
        figures(done, drafted);
        if (drafted) draw(at("chart"), done.accepted_at, chunk.metrics.speculative_decoding.num_spec_steps);
        continue;
      }
      text += chunk.choices[0].delta.content ?? "";
      const traced = chunk.foredraft.tokens;
      showTokens(box, traced);
      first ||= performance.now();
      tokens += traced.length;
      steps += traced.length ? 1 : 0;
      const live = chunk.foredraft.live;
      if (steps > 1) {
        const seconds = (performance.now() - first) / 1000;
        figures({ mean_emitted: tokens / steps, accept_rate: live.accept_rate, levels: live.levels, tokens_per_s: tokens / seconds }, drafted);
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      box.classList.add("error");
      box.append(`${error.message}`);
    }
  }
  return text;
}

async function send() {
  const said = at("say").value.trim();
  if (!said || running) return;
  running = new AbortController();
  at("send").disabled = true;
  at("stop").disabled = false;
  at("say").value = "";
  turn("user").textContent = said;
  const question = { role: "user", content: said };
  messages.push(question);
  const drafted = at("draft").checked;
  if (at("both").checked && drafted) await answer(false, "without drafts");
  const text = running.signal.aborted ? "" : await answer(drafted, drafted ? "with drafts" : "without drafts");
  if (messages.at(-1) === question) { // else a new conversation was begun
    if (text) messages.push({ role: "assistant", content: text });
    else messages.pop();
  }
  running = null;
  at("send").disabled = false;
  at("stop").disabled = true;
  at("say").focus();
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("say").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
at("stop").addEventListener("click", () => running?.abort());
at("reset").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  at("talk").replaceChildren();
});

async function showModel() {
  const key = at("key").value;
  const response = await fetch("/v1/models", { headers: key ? { authorization: `Bearer ${key}` } : {} });
  if (!response.ok) {
    at("model").textContent = "needs an API key";
    return;
  }
  const [model] = (await response.json()).data;
  at("model").textContent = `${model.id}, draft ${model.draft}`;
}
at("key").addEventListener("change", showModel);
showModel();
draw(at("chart"), [], 0);
at("say").focus();
