"""Networks published as files: their configurations, and a pickle reader that runs none of their code."""
