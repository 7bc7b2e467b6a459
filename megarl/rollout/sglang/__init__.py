"""Generation by SGLang servers: their processes, the fleet as one rank sees it, the client and the engine over it."""
