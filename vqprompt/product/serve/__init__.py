"""A web page and an HTTP interface for models: `vqprompt serve`.

Predictions come from an immutable snapshot (models.py), many at a time (batching.py). Everything that changes a model
is a job (jobs.py), done by a second process (teacher.py) on a copy, and swapped in when its file is whole on disk.
state.py holds the parts, app.py puts the routes around them, server.py runs them, static/ is the page.
"""
