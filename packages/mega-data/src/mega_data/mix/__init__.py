"""Mix datasets by weight: a document-level shuffle, split and upsampling in bounded memory."""
