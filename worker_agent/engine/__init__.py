"""The engines an agent can drive: any OpenAI-compatible server, llama.cpp, and the fake engine."""
