// Requests to the server that the page came from, with the key, which is kept as long as the tab is open.

const STORED = "chairlift.key";

export const key = {
  get: () => sessionStorage.getItem(STORED) ?? "",
  // Throws what is wrong with it: a browser sends no request at all with a header that it can't write.
  set: (value) => {
    try {
      new Headers({ Authorization: `Bearer ${value}` });
    } catch {
      throw new Error("This is no key: it has a character that can't be sent, such as the … of one that was shortened.");
    }
    sessionStorage.setItem(STORED, value);
  },
};

export class Refused extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function refusal(answer) {
  const text = await answer.text();
  try {
    const { error, code } = JSON.parse(text);
    return new Refused(answer.status, error.code ?? code, error.message ?? error);
  } catch {
    return new Refused(answer.status, null, text.slice(0, 500) || `status ${answer.status}`);
  }
}

// The answer, if all is well, or else throws what the server says of it.
export async function ask(path, { body, ...more } = {}) {
  const headers = key.get() ? { Authorization: `Bearer ${key.get()}` } : {};
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    more = { method: "POST", body: JSON.stringify(body), ...more };
  }
  const answer = await fetch(path, { headers, cache: "no-store", ...more });
  if (!answer.ok) throw await refusal(answer);
  return answer;
}

// The events of a stream, each with its name and data.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (text + value).split("\n\n");
      text = parts.pop();
      for (const part of parts) {
        const lines = part.split("\n");
        const of = (field) => lines.filter((line) => line.startsWith(`${field}: `))
          .map((line) => line.slice(field.length + 2)).join("\n");
        yield { name: of("event") || "message", data: of("data") };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
