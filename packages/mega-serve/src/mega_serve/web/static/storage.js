// Browser storage that may be switched off: reading then returns null, writing does nothing.

export function readItem(storage, key) {
  try {
    return window[storage].getItem(key);
  } catch {
    return null;
  }
}

export function writeItem(storage, key, value) {
  try {
    if (value === null || value === "") window[storage].removeItem(key);
    else window[storage].setItem(key, value);
  } catch {
    // a private window or a full disk: the value lives as long as the page
  }
}
