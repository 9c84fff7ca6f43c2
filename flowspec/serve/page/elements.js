// Small helpers for elements, whose text is set as text.

export const NONE = "–";

export const byId = (id) => document.getElementById(id);

// Sets a text where it is another one: what stays as it is is not told anew to those who listen.
export function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function made(tag, className, parent, text = "") {
  const found = document.createElement(tag);
  found.className = className;
  found.textContent = text;
  parent?.append(found);
  return found;
}

// So many of a thing, whose name takes an s where there are several, or is given.
export const count = (many, one, several = `${one}s`) => `${many} ${many === 1 ? one : several}`;

export const share = (value) =>
  value === null || value === undefined ? NONE : `${Math.round(100 * value)}%`;

// Of [first, end] as frames tell them.
export const layersOf = ([first, end]) =>
  end - first === 1 ? `layer ${first}` : `layers ${first}–${end - 1}`;

export const number = (value, digits = value < 100 ? 1 : 0) =>
  value === null || value === undefined ? NONE : value.toFixed(digits);
