// A caller that was written from ops/docs/protocol.md: the public NATS client, JSON, and nothing of ours.
//
//     node client.mjs <scenario> <server> <user> <password> <lane>
//
// does one scenario and prints what it saw, as one JSON object.
import { connect, headers } from "@nats-io/transport-node";
import { jetstream, jetstreamManager } from "@nats-io/jetstream";

const PATIENCE_MS = 30_000;
const [, , scenario, servers, user, pass, lane] = process.argv;
const client = "web-1";

const nc = await connect({ servers, user, pass });
const js = jetstream(nc);
const results = (await jetstreamManager(nc, { checkAPI: false })).direct;

const heard = [];
const waiting = new Set();
const json = headers();
json.set("Content-Type", "application/json");

function hear(error, message) {
  if (error) throw error;
  heard.push({ ...message.json(), at_ms: performance.now() });
  for (const look of waiting) look();
}

function first(job, ...types) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(
      () => reject(new Error(`no ${types} of ${job}; heard ${JSON.stringify(heard)}`)),
      PATIENCE_MS,
    );
    const look = () => {
      const found = heard.find((event) => event.job === job && types.includes(event.type));
      if (!found) return;
      clearTimeout(timer);
      waiting.delete(look);
      resolve(found);
    };
    waiting.add(look);
    look();
  });
}

function aJob(id, content, { max_tokens = 8, stream = false, ...fields } = {}) {
  const body = { model: "tiny", messages: [{ role: "user", content }], max_tokens, stream };
  return { id, lane, band: 1, model: "tiny", client, body, ...fields };
}

async function submit(job, { submission = 0, subject = `jobs.${lane}.1.tiny` } = {}) {
  return await js.publish(subject, JSON.stringify(job), {
    msgID: `${job.id}.${submission}`,
    headers: json,
  });
}

async function ask(verb, question) {
  const reply = await nc.request(`ctl.lane.${lane}.${verb}`, JSON.stringify(question), {
    headers: json,
    timeout: 5000,
  });
  return reply.json();
}

async function record(job, of = lane) {
  const stored = await results.getMessage(`RESULTS_${of}`, { last_by_subj: `results.${of}.${job}` });
  return stored && { ...stored.json(), content_type: stored.header.get("Content-Type") };
}

async function failure(attempt) {
  try {
    return { answered: await attempt() };
  } catch (error) {
    return { error: error.name };
  }
}

const scenarios = {
  // A streamed chat: receipts, tokens, end, record; the same again under its message id.
  async chat() {
    const state = new Promise((resolve) => {
      nc.subscribe(`q.${lane}.json`, { max: 1, callback: (_, message) => resolve(message.json()) });
    });
    const stored = await submit(aJob("chat", "Hello", { stream: true }));
    const end = await first("chat", "end");
    const again = await submit(aJob("chat", "Hello", { stream: true }));
    return {
      stored,
      again,
      end,
      tokens: heard.filter((event) => event.type === "tokens"),
      types: heard.map((event) => event.type),
      record: await record("chat"),
      asked: await ask("result", { job: "chat" }),
      estimate: await ask("estimate", { band: 1, model: "tiny" }),
      state: await state,
    };
  },

  // One long prompt twice, then another: what was computed of them leads them to their caches.
  async prefixes() {
    const ends = [];
    for (const [id, letter] of [["a-1", "a"], ["a-2", "a"], ["b-1", "b"], ["b-2", "b"], ["a-3", "a"]]) {
      await submit(aJob(id, `${letter} long story. `.repeat(600)));
      ends.push((await first(id, "end")).record);
    }
    return { ends };
  },

  // Cancelled while it runs, and as soon as it is stored.
  async cancel() {
    await submit(aJob("runs", "Go on and on", { max_tokens: 10_000, stream: true }));
    await first("runs", "tokens");
    const asked_at_ms = performance.now();
    const running = await ask("cancel", { job: "runs" });
    const end = await first("runs", "end");
    const stored = await submit(aJob("waits", "Go on and on", { max_tokens: 10_000 }));
    const queued = await ask("cancel", {
      job: "waits",
      stream: stored.stream,
      stream_sequence: stored.seq,
    });
    return {
      running,
      end,
      took_ms: end.at_ms - asked_at_ms,
      queued,
      other: await first("waits", "end"),
      unknown: await ask("cancel", { job: "nobody" }),
    };
  },

  // Messages that are no jobs, queues that are not there, and other people's things.
  async refusals() {
    const bad = await submit({ ...aJob("bad", "x"), body: 7 });
    const garbage = await js.publish(`jobs.${lane}.1.tiny`, "{", { headers: json });
    const told = await first("bad", "end");
    while (!(await record(`bad-j${garbage.seq}`)));
    return {
      told,
      records: [await record(`bad-j${bad.seq}`), await record(`bad-j${garbage.seq}`)],
      model: await failure(() => submit(aJob("huge", "x"), { subject: `jobs.${lane}.1.huge` })),
      estimate: await ask("estimate", { band: 1, model: "huge" }),
      missing: await record("nobody"),
      other_lane: await failure(() => submit(aJob("x", "x"), { subject: "jobs.offline.1.tiny" })),
      other_record: await failure(() => record("x", "offline")),
      forged: await failure(() => js.publish(`results.${lane}.forged`, "{}")),
      purged: (await nc.request(`$JS.API.STREAM.PURGE.JOBS_${lane}`, "")).json(),
    };
  },
};

nc.subscribe(`out.${lane}.${client}.*`, { callback: hear });
await nc.flush();
console.log(JSON.stringify(await scenarios[scenario]()));
await nc.drain();
