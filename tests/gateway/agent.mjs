// An agent with the package of OpenAI for node: a call of a tool, its result in a stream, two samples, a refusal.
import fs from "node:fs";
import OpenAI from "openai";

const { row } = JSON.parse(fs.readFileSync(process.env.MEGARL_TASK, "utf8"));
const client = new OpenAI();
const received = [];
const keep = (choice) => {
  received.push([choice.token_ids, choice.logprobs.content.map((entry) => entry.logprob)]);
  return choice;
};

const parameters = { type: "object", properties: { a: { type: "integer" } } };
const tools = [{ type: "function", function: { name: "add", description: "Add.", parameters } }];
const more = { model: process.env.MEGARL_MODEL, tools, logprobs: true, return_token_ids: true };
const messages = [
  { role: "system", content: "you are kind" },
  { role: "user", content: row.prompt },
];

const first = keep((await client.chat.completions.create({ ...more, messages })).choices[0]);
const [call] = first.message.tool_calls;
if (JSON.parse(call.function.arguments).a !== 1) throw new Error(call.function.arguments);
messages.push(first.message, { role: "tool", tool_call_id: call.id, content: "3" });

const stream = client.chat.completions.stream({ ...more, messages });
let last;
for await (const chunk of stream) last = chunk.choices[0] ?? last;
keep(last);
messages.push((await stream.finalChatCompletion()).choices[0].message, { role: "user", content: "why" });

const both = await client.chat.completions.create({ ...more, messages, n: 2 });
both.choices.forEach(keep);

try {
  await client.chat.completions.create({ ...more, messages, logit_bias: { 5: 1 } });
  throw new Error("it was not refused");
} catch (error) {
  if (!(error instanceof OpenAI.BadRequestError)) throw error;
}
fs.writeFileSync(row.file, JSON.stringify(received));
fs.writeFileSync(process.env.MEGARL_RESULT, "1");
