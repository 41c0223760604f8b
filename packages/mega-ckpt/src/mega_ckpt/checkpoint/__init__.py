"""A checkpoint opened in any format, and written, verified and merged in ours."""
