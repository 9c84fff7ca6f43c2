// Vercel's AI SDK: `node with_ai_sdk.mjs PART URL MODEL`, as run.py for Python's clients.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, stepCountIs, streamObject, streamText, tool } from "ai";

const [part, baseURL, model] = process.argv.slice(2);
const SUM = "What is 17 + 25?";
const WEATHER = "What is the weather in Paris?";
const integer = { type: "integer", minimum: 0, maximum: 999 };
const schema = jsonSchema({
  type: "object",
  properties: { first: integer, result: integer },
  required: ["first", "result"],
  additionalProperties: false,
});
const compatible = createOpenAICompatible({
  name: "ours",
  baseURL,
  apiKey: "none",
  supportsStructuredOutputs: true,
  includeUsage: true,
});
const official = createOpenAI({ baseURL, apiKey: "none" });
const models = {
  compatible: compatible(model),
  chat: official.chat(model),
  responses: official.responses(model),
};

const check = (holds, got) => {
  if (!holds) throw new Error(`got ${JSON.stringify(got)}`);
  return typeof got === "string" ? got : JSON.stringify(got);
};
const checkForm = (found) =>
  check(["first", "result"].every((name) => Number.isInteger(found[name]) && found[name] <= 999), found);

const gathered = async (stream) => {
  let text = "";
  for await (const chunk of stream.fullStream) {
    if (chunk.type === "error") throw chunk.error;
    if (chunk.type === "text-delta") text += chunk.text ?? chunk.delta;
  }
  return text;
};

const asked = (cities) => ({
  prompt: WEATHER,
  stopWhen: stepCountIs(3),
  maxRetries: 0,
  tools: {
    get_weather: tool({
      description: "The weather of a city",
      inputSchema: jsonSchema({
        type: "object",
        properties: { city: { type: "string" } },
        required: ["city"],
        additionalProperties: false,
      }),
      execute: async ({ city }) => {
        cities.push(city);
        return "It rains.";
      },
    }),
  },
});
const checkWeather = (text, cities) =>
  check(text === "It rains in Paris." && cities.join() === "Paris", `${text} ${cities}`);

const tasks = { text: {}, tools: {}, forced: {} };
for (const [name, own] of Object.entries(models)) {
  const plain = { model: own, prompt: SUM, maxRetries: 0 };
  tasks.text[`${name}_generate`] = async () => {
    const { text } = await generateText(plain);
    return check(text.includes("42"), text);
  };
  tasks.text[`${name}_stream`] = async () => {
    const text = await gathered(streamText(plain));
    return check(text.includes("42"), text);
  };
  tasks.text[`${name}_object`] = async () => checkForm((await generateObject({ ...plain, schema })).object);
  tasks.text[`${name}_object_streamed`] = async () => {
    const stream = streamObject({ ...plain, schema });
    for await (const _ of stream.partialObjectStream);
    return checkForm(await stream.object);
  };
  tasks.tools[`${name}_call`] = async () => {
    const cities = [];
    const { text } = await generateText({ model: own, ...asked(cities) });
    return checkWeather(text, cities);
  };
  tasks.tools[`${name}_call_streamed`] = async () => {
    const cities = [];
    const text = await gathered(streamText({ model: own, ...asked(cities) }));
    return checkWeather(text, cities);
  };
  tasks.forced[`${name}_call`] = async () => {
    // Once: each step has to call, also one behind a result.
    const once = { toolChoice: "required", stopWhen: stepCountIs(1) };
    const { toolCalls } = await generateText({ model: own, ...asked([]), ...once });
    return check(toolCalls.length === 1, toolCalls);
  };
}

for (const [name, work] of Object.entries(tasks[part])) {
  let told;
  try {
    told = { right: true, got: String(await work()).slice(0, 400) };
  } catch (error) {
    told = { right: false, got: `${error.name}: ${error.message}`.slice(0, 400) };
  }
  console.log(JSON.stringify({ task: `${part}_${name}`, ...told }));
}
