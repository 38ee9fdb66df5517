// The npm package ai with its providers for OpenAI, for servers like it, and for Anthropic.
import assert from "node:assert/strict";
import test from "node:test";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const url = process.env.CHAIRLIFT_URL;
const baseURL = `${url}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const like = createOpenAICompatible({ name: "chairlift", baseURL, supportsStructuredOutputs: true, includeUsage: true });
const models = {
  chat: openai.chat("demo"),
  responses: openai.responses("demo"),
  like: like("demo"),
  messages: createAnthropic({ baseURL, apiKey: "none" })("demo"),
};
const prompt = "What is batching?";
const Weather = z.strictObject({ city: z.enum(["Paris", "Oslo"]) });
const common = { prompt, temperature: 0, maxOutputTokens: 400, maxRetries: 0 };

test("reasoning", async () => {
  const model = like("demo");
  const asked = { model, ...common, maxOutputTokens: 20, providerOptions: { chairlift: { enable_thinking: true } } };
  const made = await generateText(asked);
  assert.ok(made.reasoningText);
  const stream = streamText(asked);
  await stream.consumeStream();
  assert.equal(await stream.reasoningText, made.reasoningText);
});

for (const [name, model] of Object.entries(models)) {
  test(`${name}: an answer and its stream are the same`, async () => {
    const made = await generateText({ model, ...common });
    const stream = streamText({ model, ...common });
    let text = "";
    for await (const piece of stream.textStream) text += piece;
    assert.equal(text, made.text);
    assert.equal(await stream.finishReason, made.finishReason);
    assert.ok((await stream.usage).outputTokens > 0);
  });

  test(`${name}: an object`, async () => {
    Weather.parse((await generateObject({ model, schema: Weather, ...common })).object);
    const stream = streamObject({ model, schema: Weather, ...common });
    let last;
    for await (const part of stream.partialObjectStream) last = part;
    Weather.parse(last);
    assert.deepEqual(await stream.object, last);
  });

  test(`${name}: a loop with a tool`, async () => {
    const seen = [];
    const weather = tool({
      description: "How the weather is.",
      inputSchema: Weather,
      execute: async (given) => {
        seen.push(given);
        return "Sunny";
      },
    });
    const asked = {
      model,
      ...common,
      tools: { weather },
      stopWhen: stepCountIs(3),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : { type: "tool", toolName: "weather" } }),
    };
    const made = await generateText(asked);
    assert.equal(made.steps.length, 2);
    const stream = streamText(asked);
    await stream.consumeStream();
    assert.equal((await stream.steps).length, 2);
    assert.equal(seen.length, 2);
    assert.deepEqual(seen[0], seen[1]);
  });

  test(`${name}: errors are those of the client`, async () => {
    await assert.rejects(generateText({ model, ...common, prompt: "a ".repeat(5000) }), APICallError);
  });
}
