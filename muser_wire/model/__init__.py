"""The model as data: spec, checkpoint reading, tokenizer. To numpy only; each node goes on from there."""
