"""Generation on SGLang servers: their processes and states, weight updates, requests, and the engine."""
