// Aligns the text of a stream with its tokens.
//
// They do not come in step: a server holds back text that may become a stop string, sends a character only
// when its last byte is there, and gives a special token no text. The text is what counts: every character of
// it ends up in exactly one piece {text, tokens}; a piece has no token without log-probabilities, several
// where only together they form a character.

export class TokenAligner {
  #text = "";
  #tokens = [];

  /** Add a chunk and return the pieces that are complete. */
  push(text, tokens) {
    this.#text += text;
    this.#tokens.push(...tokens);
    const pieces = [];
    while (this.#text !== "") {
      const piece = this.#nextPiece();
      if (piece === null) break;
      pieces.push(piece);
    }
    return pieces;
  }

  /** Return the rest at the end of the stream. Tokens without text (end of document) are dropped. */
  flush() {
    const pieces = this.#text === "" ? [] : [{ text: this.#text, tokens: this.#tokens }];
    this.#text = "";
    this.#tokens = [];
    return pieces;
  }

  #nextPiece() {
    const text = this.#text;
    const head = this.#tokens[0];
    if (head === undefined) return this.#take(text.length, 0);
    if (!head.isPartial) {
      if (head.text !== "" && text.startsWith(head.text)) return this.#take(head.text.length, 1);
      if (head.text.startsWith(text)) return null; // the rest of the token's text is still held back
      // some tokenizers drop the space before the first word
      const stripped = head.text.trimStart();
      if (stripped !== "" && text.startsWith(stripped)) return this.#take(stripped.length, 1);
    }
    return this.#takeUpToNextWholeToken();
  }

  /** Take the text before the next token that can be located, for all tokens before it. */
  #takeUpToNextWholeToken() {
    for (let i = 1; i < this.#tokens.length; i++) {
      const { text, isPartial } = this.#tokens[i];
      const offset = isPartial || text === "" ? -1 : this.#text.indexOf(text);
      if (offset > 0) return this.#take(offset, i);
      if (offset === 0 && !this.#tokens.slice(0, i).some((token) => token.isPartial)) {
        this.#tokens.splice(0, i); // special tokens without text
        return this.#nextPiece();
      }
    }
    return this.#take(this.#text.length, this.#tokens.length);
  }

  #take(length, count) {
    const piece = { text: this.#text.slice(0, length), tokens: this.#tokens.splice(0, count) };
    this.#text = this.#text.slice(length);
    return piece;
  }
}
