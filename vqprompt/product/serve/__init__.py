"""A web page and an HTTP interface for models: `vqprompt serve`.

Predictions come from an immutable snapshot (models.py), many at a time (batching.py). Everything that changes a model
is a job: changes.py says what kinds there are, a second process (jobs.py) does them on a copy, and the snapshot is
replaced when the new file is whole on disk. state.py holds the parts and knows what they keep, guard.py
protects them, server.py puts the routes (api_….py) around them and runs them, static/ is the page.
"""
