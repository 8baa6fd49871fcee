"""Records what TensorFlow's feature columns answer, for the tests of `embedfuse.torch.feature_column`.

    python scripts/record_feature_columns.py tests/data/feature_columns.json

Needs TensorFlow (2.16 was used), and nothing of embedfuse. Columns are written as the expressions that both libraries
understand; the tests evaluate the same text with ours.
"""

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
COLUMNS = {name: getattr(v1.feature_column, name) for name in dir(v1.feature_column) if not name.startswith("_")}
# TensorFlow wants dtype objects, which ours has no use for
COLUMNS["categorical_column_with_hash_bucket"] = lambda key, buckets, dtype="string": (
    v1.feature_column.categorical_column_with_hash_bucket(key, buckets, tf.as_dtype(dtype))
)


def sparse(rows: list[list[Any]], dtype: str, shape: list[int] | None = None) -> dict[str, Any]:
    """A ragged list as a SparseTensor."""
    indices = [[row, place] for row, values in enumerate(rows) for place in range(len(values))]
    width = max([len(row) for row in rows] + [1])
    return {
        "kind": "sparse", "dtype": dtype, "indices": indices, "values": [v for row in rows for v in row],
        "shape": shape or [len(rows), width],
    }  # fmt: skip


def dense(values: Any, dtype: str) -> dict[str, Any]:
    return {"kind": "dense", "dtype": dtype, "values": values}


WORDS = sparse([["ape", "bee"], [], ["cat", "cat", "dog"], ["", "elk"]], "string")
OTHER = sparse([["x"], ["y", "z"], [], ["", "x"]], "string")
IDS = sparse([[1, 3, 3], [], [5], [0, 2]], "int64")
STRAY = sparse([[1, 3, 30], [-1], [-7, 5], [0, 2]], "int64")
WEIGHTS = sparse([[0.5, 2.0, 0.25], [], [1.5], [0.0, -1.0]], "float32")
PADDED = dense([[1, 3, -1], [-1, -1, -1], [5, -1, 2], [0, 0, 4]], "int64")
PADDED_WORDS = dense([["ape", ""], ["", ""], ["bee", "cat"], ["", "dog"]], "string")
FLAT_WORDS = dense(["ape", "", "bee", "zebra"], "string")
AGES = dense([-1.0, 0.0, 17.5, 99.0], "float32")
PAIRS = dense([[0.5, 10.0], [1.0, 100.0], [5.0, -3.0], [9.0, 50.0]], "float32")
FEATURES = {
    "words": WORDS, "other": OTHER, "ids": IDS, "stray": STRAY, "weights": WEIGHTS, "padded": PADDED,
    "padded_words": PADDED_WORDS, "flat_words": FLAT_WORDS, "ages": AGES, "pairs": PAIRS,
    "padded_weights": dense([[0.5, 2.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.25], [3.0, 1.0, 2.0]], "float32"),
}  # fmt: skip

IDENTITY = "categorical_column_with_identity"
LISTED = "categorical_column_with_vocabulary_list"
HASHED = "categorical_column_with_hash_bucket"
CASES = {
    "identity_mean": f"[embedding_column({IDENTITY}('ids', 6), 3)]",
    "identity_sum": f"[embedding_column({IDENTITY}('ids', 6), 3, 'sum')]",
    "identity_sqrtn": f"[embedding_column({IDENTITY}('ids', 6), 3, 'sqrtn')]",
    "identity_max_norm": f"[embedding_column({IDENTITY}('ids', 6), 3, max_norm=0.7)]",
    "identity_default": f"[embedding_column({IDENTITY}('stray', 6, 2), 3)]",
    "identity_padded": f"[embedding_column({IDENTITY}('padded', 6), 2, 'sum')]",
    "hash_words": f"[embedding_column({HASHED}('words', 7), 3)]",
    "hash_padded_words": f"[embedding_column({HASHED}('padded_words', 7), 3)]",
    "hash_flat_words": f"[embedding_column({HASHED}('flat_words', 7), 3)]",
    "hash_ints": f"[embedding_column({HASHED}('stray', 9, 'int64'), 3)]",
    "listed": f"[embedding_column({LISTED}('words', ['bee', 'cat', 'elk']), 3)]",
    "listed_default": f"[embedding_column({LISTED}('words', ['bee', 'cat', 'elk'], default_value=1), 3)]",
    "listed_oov": f"[embedding_column({LISTED}('words', ['bee', 'cat'], num_oov_buckets=3), 3, 'sum')]",
    "listed_ints": f"[embedding_column({LISTED}('stray', [5, 30, -7]), 3, 'sum')]",
    "listed_ints_oov": f"[embedding_column({LISTED}('stray', [5, 30], num_oov_buckets=4), 3, 'sum')]",
    "file": f"[embedding_column({IDENTITY.replace('identity', 'vocabulary_file')}('words', FILE), 2, 'sum')]",
    "file_oov": "[embedding_column(categorical_column_with_vocabulary_file('words', FILE, 2, 2), 2, 'sum')]",
    "weighted_mean": f"[embedding_column(weighted_categorical_column({IDENTITY}('ids', 6), 'weights'), 3)]",
    "weighted_sum": f"[embedding_column(weighted_categorical_column({IDENTITY}('ids', 6), 'weights'), 3, 'sum')]",
    "weighted_sqrtn": f"[embedding_column(weighted_categorical_column({IDENTITY}('ids', 6), 'weights'), 3, 'sqrtn')]",
    "numeric": "[numeric_column('ages'), numeric_column('pairs', (2,))]",
    "bucketized": "[bucketized_column(numeric_column('ages'), [0, 17.5, 50])]",
    "bucketized_pairs": "[bucketized_column(numeric_column('pairs', (2,)), [1, 10])]",
    "bucketized_embedding": "[embedding_column(bucketized_column(numeric_column('pairs', (2,)), [1, 10]), 2)]",
    "indicator": f"[indicator_column({IDENTITY}('ids', 6))]",
    "indicator_listed": f"[indicator_column({LISTED}('words', ['bee', 'cat', 'elk']))]",
    "indicator_weighted": f"[indicator_column(weighted_categorical_column({IDENTITY}('ids', 6), 'weights'))]",
    "crossed": "[embedding_column(crossed_column(['words', 'other'], 11), 3)]",
    "crossed_key": "[indicator_column(crossed_column(['words', 'other'], 11, 42))]",
    "crossed_dense": "[indicator_column(crossed_column(['padded_words', 'words', 'flat_words'], 13))]",
    "crossed_mixed": f"[indicator_column(crossed_column(['words', {IDENTITY}('ids', 6)], 13))]",
    "crossed_buckets": "[indicator_column(crossed_column([bucketized_column(numeric_column('pairs', (2,)), [1, 10]),"
    " 'flat_words'], 13))]",
    "crossed_nested": "[indicator_column(crossed_column([crossed_column(['words', 'other'], 5), 'flat_words'], 17))]",
    "shared": f"[*shared_embedding_columns([{IDENTITY}('padded', 6), {IDENTITY}('ids', 6)], 3, 'sum', max_norm=1.0)]",
    "order": f"[indicator_column({LISTED}('words', ['bee', 'cat'])), numeric_column('ages'),"
    f" embedding_column({HASHED}('words', 5), 2), bucketized_column(numeric_column('ages'), [0.0, 20.0]),"
    f" embedding_column(crossed_column(['other', 'words'], 5), 2), embedding_column({IDENTITY}('ids', 6), 2),"
    f" *shared_embedding_columns([{IDENTITY}('padded', 6), {IDENTITY}('stray', 6, 0)], 2), numeric_column('pairs', 2)]",
}
LINEAR = {
    "linear": f"[{IDENTITY}('ids', 6), {HASHED}('words', 5), numeric_column('pairs', (2,)),"
    " bucketized_column(numeric_column('ages'), [0.0, 20.0]), crossed_column(['words', 'other'], 7),"
    f" weighted_categorical_column({IDENTITY}('padded', 6), 'padded_weights')]",
    "linear_mean": f"[{IDENTITY}('ids', 6), {HASHED}('words', 5)]",
}


def tensor(feature: dict[str, Any]) -> Any:
    dtype = tf.as_dtype(feature["dtype"])
    values = tf.constant(feature["values"], dtype)
    if feature["kind"] == "dense":
        return values
    return tf.SparseTensor(np.reshape(feature["indices"], (-1, 2)).astype(np.int64), values, feature["shape"])


def pattern(shape: tuple[int, ...], phase: float) -> np.ndarray:
    """Numbers without a pattern that could hide a mistake."""
    return np.sin(np.arange(math.prod(shape), dtype=np.float64) * 1.7 + phase).reshape(shape).astype(np.float32)


def rounded(array: Any) -> Any:
    return np.round(np.asarray(array, np.float64), 7).tolist()


def run(text: str, kind: str, file: str) -> dict[str, Any]:
    """One case: tables, output, gradients of the tables."""
    with tf.Graph().as_default(), v1.Session() as session:
        columns = eval(text, {**COLUMNS, "FILE": file})
        features = {name: tensor(value) for name, value in FEATURES.items()}
        if kind == "input":
            places: dict[Any, Any] = {}
            out = v1.feature_column.input_layer(features, columns, cols_to_output_tensors=places)
        else:
            combiner = "mean" if kind == "linear_mean" else "sum"
            out = v1.feature_column.linear_model(features, columns, units=2, sparse_combiner=combiner)
            places = {}
        variables = v1.trainable_variables()
        session.run([v1.global_variables_initializer(), v1.tables_initializer()])
        values = [pattern(tuple(v.shape.as_list()), 0.3 + number) for number, v in enumerate(variables)]
        for variable, value in zip(variables, values, strict=True):
            variable.load(value, session)
        upstream = pattern(tuple(session.run(out).shape), 0.9)
        loss = tf.reduce_sum(out * upstream)
        gradients = [tf.convert_to_tensor(g) for g in tf.gradients(loss, variables)]
        found, gradients = session.run([out, gradients])
        return {
            "columns": text,
            "order": [column.name for column in sorted(columns, key=lambda c: c.name)],
            "output": rounded(found),
            "variables": {v.op.name: rounded(value) for v, value in zip(variables, values, strict=True)},
            "gradients": {v.op.name: rounded(g) for v, g in zip(variables, gradients, strict=True)},
        }


def seed_example() -> dict[str, Any]:
    """DeepRec's page: five rows of one id each, all ones, twice the output, summed, FTRL."""
    ids = [0, 1, 1, 2, 3]
    with tf.Graph().as_default(), v1.Session() as session:
        indices = [[row, 0] for row in range(5)]
        features = {"id": tf.SparseTensor(indices, tf.constant(ids, tf.int64), [5, 1])}
        categorical = v1.feature_column.categorical_column_with_identity("id", 6)
        column = v1.feature_column.embedding_column(categorical, 3, initializer=tf.ones_initializer())
        out = v1.feature_column.input_layer(features, [column])
        loss = tf.reduce_sum(out * 2)
        rule = v1.train.FtrlOptimizer(0.1, l1_regularization_strength=2.0, l2_regularization_strength=1e-5)
        step = rule.minimize(loss)
        (table,) = v1.trainable_variables()
        session.run(v1.global_variables_initializer())
        losses, tables = [], []
        for _ in range(3):
            losses.append(float(session.run([loss, step])[0]))
            tables.append(rounded(session.run(table)))
        slots = {name: rounded(session.run(rule.get_slot(table, name))) for name in rule.get_slot_names()}
    return {"ids": ids, "losses": losses, "tables": tables, "slots": slots}


RULES = {
    "adagrad": lambda: v1.train.AdagradOptimizer(0.1, initial_accumulator_value=0.2),
    "adam": lambda: v1.train.AdamOptimizer(0.05),
    "ftrl": lambda: v1.train.FtrlOptimizer(0.1, l1_regularization_strength=0.01, l2_regularization_strength=0.02),
}
LAYER = f"[embedding_column({IDENTITY}('ids', 7), 2, 'sum'), embedding_column({IDENTITY}('padded', 8), 3)]"


def training(rule: str, partitions: int) -> dict[str, Any]:
    """All variables after two steps of a layer whose tables lie in parts, and the tables after a third."""
    with tf.Graph().as_default(), v1.Session() as session:
        columns = eval(LAYER, COLUMNS)
        features = {name: tensor(value) for name, value in FEATURES.items()}
        with v1.variable_scope("model", partitioner=v1.fixed_size_partitioner(partitions)):
            out = v1.feature_column.input_layer(features, columns)
        upstream = pattern(tuple(out.shape.as_list()), 0.9)
        step = RULES[rule]().minimize(tf.reduce_sum(out * upstream), global_step=v1.train.get_or_create_global_step())
        session.run(v1.global_variables_initializer())
        for number, variable in enumerate(v1.trainable_variables()):
            variable.load(pattern(tuple(variable.shape.as_list()), 0.3 + number), session)
        session.run(step)
        session.run(step)
        before = {v.op.name: full(session.run(v)) for v in v1.global_variables()}
        session.run(step)
        after = {v.op.name: full(session.run(v)) for v in v1.trainable_variables()}
    return {"rule": rule, "columns": LAYER, "variables": before, "after": after}


def full(array: Any) -> Any:
    """Every bit of a float32, in nine digits: what is loaded goes on being trained."""
    if np.ndim(array):
        return [full(row) for row in array]
    return int(array) if np.asarray(array).dtype.kind == "i" else float(f"{array:.9g}")


def fingerprints() -> dict[str, Any]:
    words = ["", "a", "ab", "abc", "Hello", "TensorFlow", "2.x", "naïve", "日本語", "x" * 17, "y" * 40, "z" * 70, "-1"]
    numbers = [0, 1, -1, 10, 12345678901, -(2**63), 2**63 - 1]
    buckets = [1, 3, 1000, 2**31 + 11, 2**63 - 1]
    with tf.Graph().as_default(), v1.Session() as session:
        hashed = lambda values, n: tf.strings.to_hash_bucket_fast(values, n)  # noqa: E731
        as_text = tf.strings.as_string(tf.constant(numbers, tf.int64))
        return {
            "words": words, "numbers": numbers, "buckets": buckets,
            "of_words": [session.run(hashed(tf.constant(words), n)).tolist() for n in buckets],
            "of_numbers": [session.run(hashed(as_text, n)).tolist() for n in buckets],
        }  # fmt: skip


def crosses() -> list[dict[str, Any]]:
    """Bucket ids of crosses, in the order in which they come."""
    made = []
    for keys, key in ((["words", "other"], None), (["ids", "words"], None), (["words", "padded_words"], 7)):
        for order in (keys, keys[::-1]):
            with tf.Graph().as_default(), v1.Session() as session:
                inputs = [tensor(FEATURES[name]) for name in order]
                values = session.run(tf.sparse.cross_hashed(inputs, 2**62, key))
            lists: list[list[int]] = [[] for _ in range(values.dense_shape[0])]
            for (row, _), value in zip(values.indices.tolist(), values.values.tolist(), strict=True):
                lists[row].append(value)
            made.append({"features": order, "hash_key": key, "buckets": lists})
    return made


def refusals() -> dict[str, str]:
    """Which inputs TensorFlow refuses, with the kind of error."""
    made = {}
    for name, text in {
        "identity_stray": f"[embedding_column({IDENTITY}('stray', 6), 3)]",
        "listed_out_of_range": f"[embedding_column({LISTED}('words', ['bee'], default_value=5), 3)]",
        "indicator_stray": f"[indicator_column({IDENTITY}('stray', 6))]",
        "twice": f"[embedding_column({IDENTITY}('ids', 6), 3), embedding_column({IDENTITY}('ids', 6), 2)]",
    }.items():
        try:
            made[name] = str(run(text, "input", "")["output"])
        except Exception as error:  # the kind is the record
            made[name] = type(error).__name__
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    v1.disable_eager_execution()
    lines = ["cat", "ape", "elk"]
    file = options.out.with_suffix(".vocabulary")
    file.write_text("\n".join(lines) + "\n")
    try:
        record = {
            "made_by": f"TensorFlow {tf.__version__}, compat.v1.feature_column, CPU",
            "features": FEATURES,
            "file": lines,
            "cases": {name: run(text, "input", str(file)) for name, text in CASES.items()},
            "linear": {name: run(text, name, str(file)) for name, text in LINEAR.items()},
            "crosses": crosses(),
            "fingerprints": fingerprints(),
            "seed_example": seed_example(),
            "trainings": [training(rule, 3) for rule in RULES] + [training("adagrad", 1)],
            "refusals": refusals(),
        }
    finally:
        file.unlink()
    options.out.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
    print(options.out.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
