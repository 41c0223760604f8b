"""Default limits of a request; options of the command change them."""

MAX_BATCH_TOKENS = 12000  # prompts (or beams) x tokens of the longest row
MAX_BODY_BYTES = 2 * 1024 * 1024
