// The npm package openai: chats, parsing, tools, its runner of tools, responses, streams, errors.
import assert from "node:assert/strict";
import test from "node:test";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: `${process.env.CHAIRLIFT_URL}/v1`, apiKey: "none", maxRetries: 0 });
const model = "demo";
const messages = [{ role: "user", content: "What is batching?" }];
const Weather = z.object({ city: z.enum(["Paris", "Oslo"]), days: z.literal([1, 2, 3]) });
const tool = zodFunction({ name: "weather", description: "How the weather is.", parameters: Weather });
const named = { type: "function", function: { name: "weather" } };

test("a chat and its stream are the same", async () => {
  const asked = { model, messages, seed: 1, max_completion_tokens: 40 };
  const made = await client.chat.completions.create(asked);
  let text = "";
  for await (const piece of await client.chat.completions.create({ ...asked, stream: true }))
    text += piece.choices[0]?.delta?.content ?? "";
  assert.equal(text, made.choices[0].message.content);
  const final = await client.chat.completions.stream(asked).finalChatCompletion();
  assert.equal(final.choices[0].message.content, text);
  assert.equal(final.choices[0].finish_reason, made.choices[0].finish_reason);
});

test("answers are parsed", async () => {
  const made = await client.chat.completions.parse({
    model,
    messages,
    response_format: zodResponseFormat(Weather, "weather"),
  });
  Weather.parse(made.choices[0].message.parsed);
});

test("tools in two turns", async () => {
  const asked = { model, messages, tools: [tool], tool_choice: named, parallel_tool_calls: false, seed: 1 };
  const made = await client.chat.completions.parse(asked);
  const [call] = made.choices[0].message.tool_calls;
  Weather.parse(call.function.parsed_arguments);
  const final = await client.chat.completions.stream(asked).finalChatCompletion();
  assert.equal(final.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);
  const more = await client.chat.completions.create({
    model,
    messages: [...messages, made.choices[0].message, { role: "tool", tool_call_id: call.id, content: "Sunny" }],
    tools: [tool],
    max_tokens: 5,
  });
  assert.ok(more.choices[0].finish_reason);
});

test("its runner of tools", async () => {
  const seen = [];
  const runner = client.chat.completions.runTools({
    model,
    messages,
    tools: [
      zodFunction({
        name: "weather",
        parameters: Weather,
        function: (given) => {
          seen.push(given);
          return "Sunny";
        },
      }),
    ],
    tool_choice: named,
  });
  await runner.done();
  assert.equal(seen.length, 1);
  Weather.parse(seen[0]);
});

test("responses", async () => {
  const made = await client.responses.create({ model, input: "Hi", temperature: 0, max_output_tokens: 20 });
  const stream = client.responses.stream({ model, input: "Hi", temperature: 0, max_output_tokens: 20 });
  let text = "";
  for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
  assert.equal(text, made.output_text);
  assert.equal((await stream.finalResponse()).output_text, text);
  const parsed = await client.responses.parse({
    model,
    input: "Hi",
    text: { format: zodTextFormat(Weather, "weather") },
  });
  Weather.parse(parsed.output_parsed);
});

test("errors are those of the client", async () => {
  await assert.rejects(client.chat.completions.create({ model: "nobody", messages }), OpenAI.NotFoundError);
  await assert.rejects(client.chat.completions.create({ model, messages, temperature: -1 }), OpenAI.BadRequestError);
});
