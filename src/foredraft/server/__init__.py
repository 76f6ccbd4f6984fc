"""An OpenAI-compatible HTTP server around one LLM. Needs the extra: pip install 'foredraft[serve]'."""
