// How tokens and probabilities are written for people.

/** Return the token with its white space made visible. */
export function showToken(token) {
  const marks = { " ": "\u00b7", "\n": "\u21b5", "\r": "\u240d", "\t": "\u21e5" };
  return token.label === "" ? "(empty)" : token.label.replace(/[ \n\r\t]/g, (space) => marks[space]);
}

/** Return the token in words for a screen reader. */
export function speakToken(token) {
  if (token.label === "") return "empty token";
  const names = { " ": "space", "\n": "line break", "\r": "carriage return", "\t": "tab" };
  return [...token.label.matchAll(/[^ \n\r\t]+|[ \n\r\t]/g)].map(([part]) => names[part] ?? part).join(" ");
}

/** Return exp(logprob) in per cent, with about three digits. */
export function showProbability(logprob) {
  const percent = 100 * Math.exp(logprob);
  if (percent >= 99.95) return "100 %";
  if (percent >= 10) return `${percent.toFixed(1)} %`;
  if (percent >= 0.01) return `${percent.toFixed(2)} %`;
  return "< 0.01 %";
}

// lower bounds of the colour classes 0 (most probable) to 5
export const PROBABILITY_BOUNDS = [0.9, 0.5, 0.2, 0.05, 0.01, 0];

/** Return the number of the colour class. */
export function classifyProbability(logprob) {
  const probability = Math.exp(logprob);
  return PROBABILITY_BOUNDS.findIndex((bound) => probability >= bound);
}
