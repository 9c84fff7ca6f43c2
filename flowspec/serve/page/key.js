// The form for the API key, which is kept in this tab's session only.

const NAME = "flowspec-key";

export class Key {
  // `given` is called whenever there is a new key.
  constructor(given) {
    this.given = given;
    this.dialog = document.getElementById("key");
    this.input = document.getElementById("key-value");
    this.reason = document.getElementById("key-reason");
    this.change = document.getElementById("change-key");
    this.change.hidden = !this.value;
    this.change.addEventListener("click", () => this.ask("The key that calls of this server's API carry."));
    this.asked = null;
    document.getElementById("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this._submit();
    });
    document.getElementById("key-cancel").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("close", () => this._settle(false));
  }

  get value() {
    return sessionStorage.getItem(NAME) ?? "";
  }

  // Opens the form; resolves to whether a key was given. Those who ask meanwhile wait for the same answer.
  ask(reason) {
    if (!this.asked) {
      this.change.hidden = false;
      this.reason.textContent = reason;
      this.input.value = "";
      this.asked = deferred();
      this.dialog.showModal();
    }
    return this.asked.promise;
  }

  _submit() {
    const given = this.input.value.trim();
    if (!/^[\x21-\x7e]+$/.test(given)) {
      this.reason.textContent = given
        ? "A key has letters, digits and signs of ASCII only, without blanks."
        : "Expected a key.";
      return;
    }
    sessionStorage.setItem(NAME, given);
    this._settle(true);
    this.dialog.close();
    this.given();
  }

  _settle(given) {
    const asked = this.asked;
    this.asked = null;
    asked?.resolve(given);
  }
}

function deferred() {
  let resolve;
  const promise = new Promise((done) => (resolve = done));
  return { promise, resolve };
}
