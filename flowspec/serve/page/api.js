// Calls of the server's API, with the key where there is one; and its errors, each as one readable line.

export class ApiError extends Error {
  constructor(message, { status = 0, retryS = null, refused = false } = {}) {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.retryS = retryS;
    this.refused = refused; // the person would not give a key
  }
}

// The line of an error in the API's own form, whatever else comes.
export function lineOf(found, otherwise) {
  const message = found?.error?.message;
  return typeof message === "string" && message ? message.replace(/\s+/g, " ").slice(0, 400) : otherwise;
}

export class Api {
  constructor(key) {
    this.key = key;
  }

  // The response, if the server did as asked. A key is asked for where one is needed; raises an ApiError
  // otherwise.
  async call(path, options = {}) {
    for (;;) {
      const used = this.key.value;
      const headers = { ...options.headers, ...(used ? { Authorization: `Bearer ${used}` } : {}) };
      const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
      if (response.ok) return response;
      const error = await errorOf(response);
      if (response.status !== 401) throw error;
      if (this.key.value !== used) continue; // given meanwhile
      if (
        !(await this.key.ask(used ? `This key was refused: ${error.message}` : "This server asks for a key."))
      ) {
        throw new ApiError(`No key, no answer: ${error.message}`, { status: 401, refused: true });
      }
    }
  }
}

async function errorOf(response) {
  const text = await response.text();
  let found = null;
  try {
    found = JSON.parse(text);
  } catch {
    // not the API's form: a proxy's page, say
  }
  const line = lineOf(found, `the server answered ${response.status} ${response.statusText}`.trim());
  const seconds = Number.parseFloat(response.headers.get("Retry-After") ?? "");
  return new ApiError(line, { status: response.status, retryS: Number.isFinite(seconds) ? seconds : null });
}
