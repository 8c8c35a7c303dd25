"""The engine behind OpenAI's HTTP interface, for evaluation and debugging."""
