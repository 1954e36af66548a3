"""What Prometheus can know about a server: `GET /metrics`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """One registry per server, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self.requests = Counter("vqprompt_requests", "Answered requests.", ["method", "status"], registry=own)
        self.seconds = Histogram("vqprompt_predict_seconds", "From a prediction request to its answer.", registry=own)
        self.predictions = Counter("vqprompt_predictions", "Images answered.", ["model", "answer"], registry=own)
        self.batch_images = Histogram(
            "vqprompt_batch_images", "Images shown to a model together.", buckets=(1, 2, 4, 8, 16, 32, 64), registry=own
        )
        self.waiting = Gauge("vqprompt_predictions_waiting", "Predictions that wait.", registry=own)
        self.jobs = Counter("vqprompt_jobs", "Changes of models that have ended.", ["kind", "state"], registry=own)
        self.jobs_waiting = Gauge("vqprompt_jobs_waiting", "Changes of models that wait.", registry=own)
        self.classes = Gauge("vqprompt_model_classes", "Classes that a model knows.", ["model"], registry=own)
        self.accuracy = Gauge("vqprompt_model_accuracy", "Of images left out one at a time.", ["model"], registry=own)
        self.version = Gauge("vqprompt_model_version", "The version that answers.", ["model"], registry=own)
