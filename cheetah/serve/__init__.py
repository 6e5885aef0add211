"""An HTTP server with OpenAI's protocol over one `LLM`: `app.asgi(llm)` is the application, `cheetah serve` runs it.

One thread drives the engine (`driver`); everything else is asyncio and never waits for a launch.
"""
