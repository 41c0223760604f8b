"""Tasks on which an encoder is fine-tuned: files, features and metrics, shared by training and evaluation."""
