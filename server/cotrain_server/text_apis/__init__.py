"""OpenAI's and Anthropic's endpoints: words around the generation of tokens."""
