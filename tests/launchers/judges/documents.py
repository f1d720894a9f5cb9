"""Parses documents by the projects' own models and writes them again: a key that gets lost was never one.

Run by the judge's own interpreter: documents.py FILE [VOLCANO_CRD]. Says what is wrong, line by line; exit code 1.
"""

import json
import sys
from pathlib import Path

import yaml


def lost(before, after, place=""):
    """What a document had that its copy has not, or has otherwise."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            yield from lost(value, after.get(key), f"{place}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from lost(one, other, f"{place}[{number}]")
    elif before != after and before not in ({}, []):
        yield f"{place}: {before!r} became {after!r}"


def by_trainer(name):
    """A model of Kubeflow's Trainer, which has JobSet's too."""

    def check(document):
        import kubeflow_trainer_api.models as models

        parsed = getattr(models, name).from_dict(document)
        yield from lost(document, json.loads(json.dumps(parsed.to_dict(), default=str)))

    return check


def by_training_operator(document):
    from kubeflow.training import models
    from kubernetes import client

    for name in dir(models):
        if name.startswith("KubeflowOrg"):
            setattr(client.models, name, getattr(models, name))
    api = client.ApiClient()
    answer = type("Answer", (), {"data": json.dumps(document)})
    parsed = api.deserialize(answer, models.KubeflowOrgV1PyTorchJob)
    yield from lost(document, api.sanitize_for_serialization(parsed))


def by_kubernetes(document):
    import kubernetes_validate

    try:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{'.'.join(map(str, error.path))}: {error.message}"


def strict(schema):
    """A schema in which a key that is not named is refused."""
    if isinstance(schema, dict):
        known = {key: strict(value) for key, value in schema.items()}
        if "properties" in schema and "additionalProperties" not in schema:
            known["additionalProperties"] = schema.get("x-kubernetes-preserve-unknown-fields", False)
        if schema.get("x-kubernetes-int-or-string"):
            known.pop("type", None)
        return known
    return [strict(one) for one in schema] if isinstance(schema, list) else schema


def by_crd(file):
    def check(document):
        import jsonschema

        (version,) = yaml.safe_load(Path(file).read_text())["spec"]["versions"]
        schema = strict(version["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"type": "object"}
        for error in jsonschema.Draft202012Validator(schema).iter_errors(document):
            yield f"{error.json_path}: {error.message}"

    return check


def main(file, crd=""):
    judges = {
        ("trainer.kubeflow.org/v1alpha1", "TrainJob"): by_trainer("TrainerV1alpha1TrainJob"),
        ("jobset.x-k8s.io/v1alpha2", "JobSet"): by_trainer("JobsetV1alpha2JobSet"),
        ("kubeflow.org/v1", "PyTorchJob"): by_training_operator,
        ("batch.volcano.sh/v1alpha1", "Job"): by_crd(crd),
    }
    found = []
    for document in yaml.safe_load_all(Path(file).read_text()):
        kind = document["apiVersion"], document["kind"]
        found += [f"{kind[1]}{one}" for one in judges.get(kind, by_kubernetes)(document)]
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
