"""A loaded model into an OpenAI-compatible HTTP server. Nothing here is imported before `spile serve` needs it."""
