"""How a task is learned: settings, batches, the loop, and steps that are recorded once and replayed."""
