"""What features may be given as: every kind says the same, and what cannot be right is refused with the way out."""

import pickle

import numpy as np
import pyarrow as pa
import pytest
import torch

import embedfuse
from embedfuse.torch import Bags, FusedOptimizer, SparseIds
from embedfuse.torch import feature_column as fc
from embedfuse.torch.backends import use_backend
from embedfuse.torch.feature_column.column import Features

identity = fc.categorical_column_with_identity
SPARSE = torch.sparse_coo_tensor([[0, 2, 2], [0, 1, 0]], [1, 2, 3], (3, 2), check_invariants=True)
JAGGED = torch.nested.nested_tensor([torch.tensor([1]), torch.tensor([], dtype=torch.long), torch.tensor([3, 2])],
                                    layout=torch.jagged)  # fmt: skip

SAME_IDS = {
    "bags": Bags.from_lists([[1], [], [3, 2]]),
    "bags_int32": Bags.from_lists([[1], [], [3, 2]], dtype=torch.int32),
    "sparse_ids": SparseIds(torch.tensor([[2, 1], [0, 0], [2, 0]]), torch.tensor([2, 1, 3]), (3, 2)),
    "coo": SPARSE,
    "jagged": JAGGED,
    "dense": torch.tensor([[1, -1], [-1, -1], [3, 2]]),
    "dense_int8": torch.tensor([[-1, 1], [-1, -1], [3, 2]], dtype=torch.int8),
    "lists": [[1], [], [3, 2]],
    "padded_lists": [[1, -1], (-1,), [3, 2]],
    "none_in_list": [[1], None, [3, 2]],
    "numpy": np.array([[1, -1], [-1, -1], [3, 2]], np.int8),
    "arrow": pa.array([[1], [], [3, 2]]),
    "arrow_null": pa.array([[1], None, [3, 2]], pa.large_list(pa.int32())),
    "arrow_chunks": pa.chunked_array([pa.array([[1]]), pa.array([[], [3, 2]], pa.list_(pa.int64()))]),
    "arrow_slice": pa.array([[9], [1], [], [3, 2], [7]]).slice(1, 3),
}
SAME_WORDS = {
    "lists": [["a"], [], ["é", "b"]],
    "padded": [["a", ""], ["", ""], ["é", "b"]],
    "bytes": [[b"a"], [], ["é".encode(), b"b"]],
    "numpy": np.array([["a", ""], ["", ""], ["é", "b"]]),
    "numpy_bytes": np.array([[b"a", b""], [b"", b""], ["é".encode(), b"b"]]),
    "numpy_objects": np.array([["a", ""], ["", ""], ["é", "b"]], object),
    "arrow": pa.array([["a"], [], ["é", "b"]]),
    "arrow_large": pa.array([["a"], None, ["é", "b"]], pa.large_list(pa.large_string())),
    "arrow_binary": pa.array([[b"a"], [], ["é".encode(), b"b"]]),
    "arrow_view": pa.array([["a"], [], ["é", "b"]], pa.list_(pa.string_view())),
    "arrow_dictionary": pa.ListArray.from_arrays([0, 1, 1, 3], pa.array(["a", "é", "b"]).dictionary_encode()),
    "arrow_slice": pa.array([["z"], ["a"], [], ["é", "b"]]).slice(1),
}


@pytest.mark.parametrize("kind", SAME_IDS)
def test_ids_of_every_kind_are_the_same(kind):
    bags = identity("a", 4).ids(Features({"a": SAME_IDS[kind]}, exact=True))
    assert bags.to_lists() == [[1], [], [3, 2]]
    listed = fc.categorical_column_with_vocabulary_list("a", [3, 2, 1]).ids(Features({"a": SAME_IDS[kind]}))
    assert listed.to_lists() == [[2], [], [0, 1]]


@pytest.mark.parametrize("kind", SAME_WORDS)
def test_words_of_every_kind_are_the_same(kind):
    column = fc.categorical_column_with_vocabulary_list("a", ["b", "a", "é"])
    assert column.ids(Features({"a": SAME_WORDS[kind]})).to_lists() == [[1], [], [2, 0]]
    hashed = fc.categorical_column_with_hash_bucket("a", 1000)
    expected = hashed.ids(Features({"a": SAME_WORDS["lists"]}))
    assert hashed.ids(Features({"a": SAME_WORDS[kind]})).to_lists() == expected.to_lists()


@pytest.mark.parametrize("words", [["a", None, "b"], pa.array(["a", None, "b"]), np.array(["a", "", "b"]),
                                   pa.array(["a", None, "b"]).dictionary_encode()], ids=type)  # fmt: skip
def test_one_word_an_example(words):
    column = fc.categorical_column_with_vocabulary_list("a", ["b", "a"])
    assert column.ids(Features({"a": words})).to_lists() == [[1], [], [0]]


@pytest.mark.parametrize("values", [[1.5, None], pa.array([1.5, None]), pa.array([1.5, None], pa.float64())], ids=type)
def test_missing_numbers_take_the_default(values):
    layer = fc.InputLayer([fc.numeric_column("a", default_value=7.0)])
    assert layer({"a": values}).tolist() == [[1.5], [7.0]]
    with pytest.raises(ValueError, match=r"1 missing: give numeric_column a `default_value`"):
        fc.InputLayer([fc.numeric_column("a")])({"a": values})


def test_numbers_of_every_kind():
    square = fc.numeric_column("a", (2, 2), normalizer_fn=lambda x: x.transpose(1, 2) * 2)
    for value in (torch.arange(8).reshape(2, 2, 2), np.arange(8.0).reshape(2, 2, 2), torch.arange(8).reshape(2, 4)):
        assert fc.InputLayer([square])({"a": value}).tolist() == [[0, 4, 2, 6], [8, 12, 10, 14]]
    plain = fc.InputLayer([fc.numeric_column("a", 2)])
    for value in (
        [[1, 2], [3, 4]],
        pa.array([[1, 2], [3, 4]]),
        pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2)),
    ):
        assert plain({"a": value}).tolist() == [[1, 2], [3, 4]]


def test_weights_of_every_kind():
    column = fc.weighted_categorical_column(identity("a", 4), "w")
    for ids, weights in (
        (SAME_IDS["bags"], [[0.5], [], [2.0, 3.0]]),
        (SAME_IDS["dense"], [[0.5, 0], [0, 0], [2.0, 3.0]]),
        (SAME_IDS["dense"], torch.tensor([[0.5, 9], [9, 9], [2.0, 3.0]])),
        (SAME_IDS["bags"], torch.tensor([[0.5, 0], [0, 0], [2.0, 3.0]])),
        (SAME_IDS["arrow"], pa.array([[0.5], [], [2.0, 3.0]])),
    ):
        bags = column.ids(Features({"a": ids, "w": weights}))
        assert bags.to_lists() == [[1], [], [3, 2]]
        assert bags.weights.tolist() == [0.5, 2.0, 3.0]
    # Bags may bring their own
    layer = fc.InputLayer([fc.embedding_column(identity("a", 4), 1, "sum", initializer=1.0)])
    assert layer({"a": Bags.from_lists([[1, 2]], [[0.5, 2.0]])}).tolist() == [[2.5]]


def test_weights_learn():
    weights = torch.nested.nested_tensor([torch.tensor([0.5]), torch.tensor([]), torch.tensor([2.0, 3.0])],
                                         layout=torch.jagged, requires_grad=True)  # fmt: skip
    column = fc.embedding_column(fc.weighted_categorical_column(identity("a", 4), "w"), 1, "sum", initializer=2.0)
    fc.InputLayer([column])({"a": SAME_IDS["bags"], "w": weights}).sum().backward()
    assert weights.grad.values().tolist() == [2.0, 2.0, 2.0]


def test_compiles_into_one_graph():
    columns = [fc.embedding_column(identity(key, 9), 2, do_fusion=key == "a") for key in "ab"]
    columns += [fc.numeric_column("x", 2), fc.bucketized_column(fc.numeric_column("x", 2), [0, 1])]
    layer = fc.InputLayer(columns, update="autograd")
    batch = {"a": Bags.from_lists([[1, 2], [3]]), "b": torch.tensor([[1], [2]]), "x": torch.randn(2, 2)}
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with use_backend("eager"):
        torch.testing.assert_close(compiled(batch), layer(batch))


def test_empty_batches_and_empty_lists():
    columns = [
        fc.embedding_column(fc.categorical_column_with_hash_bucket("a", 4), 3),
        fc.indicator_column(fc.categorical_column_with_vocabulary_list("b", ["x"])),
        fc.embedding_column(fc.crossed_column(["a", "b"], 5), 2),
    ]
    layer = fc.InputLayer(columns)
    assert layer({"a": [], "b": []}).shape == (0, 6)
    assert not layer({"a": [[], []], "b": pa.array([[], []])}).any()
    assert layer({"a": np.empty((0, 2), "U3"), "b": pa.array([], pa.string())}).shape == (0, 6)


def test_a_layer_trains_moves_and_pickles():
    keys = [fc.embedding_column(identity(key, 9), 2) for key in ("user.id", "item")]
    layer = fc.InputLayer([*keys, fc.numeric_column("price")], optimizer=embedfuse.SGD(1.0))
    assert layer.slices == {"item_embedding": slice(0, 2), "price": slice(2, 3), "user.id_embedding": slice(3, 5)}
    assert set(dict(layer.tables.named_tables())) == {"item_embedding", "user_id_embedding"}
    optimizer = FusedOptimizer(layer)
    batch = {"user.id": [1, 2], "item": [[3], [4, 4]], "price": [0.5, 1.5]}
    before = layer(batch)
    before.sum().backward()
    optimizer.step()
    after = layer(batch)
    torch.testing.assert_close(after[:, :2], before[:, :2] - 1)
    again = pickle.loads(pickle.dumps(layer))
    assert torch.equal(again(batch), after)
    fresh = fc.InputLayer([*keys, fc.numeric_column("price")])
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(batch), after)


def test_vocabulary_files(tmp_path):
    path = tmp_path / "words"
    path.write_bytes(b"ten\r\ntwo\n\none")
    column = fc.categorical_column_with_vocabulary_file("a", path)
    assert column.num_buckets == 4
    assert column.ids(Features({"a": [["one", "two", "no"]]})).to_lists() == [[3, 1, -1]]
    assert fc.categorical_column_with_vocabulary_file("a", path, 2, 3).num_buckets == 5
    numbers = tmp_path / "numbers"
    numbers.write_text("7\n-3\n")
    column = fc.categorical_column_with_vocabulary_file("a", numbers, dtype="int64", default_value=0)
    assert column.ids(Features({"a": [[-3, 5]]})).to_lists() == [[1, 0]]
    with pytest.raises(FileNotFoundError, match="`vocabulary_file` must be a text file"):
        fc.categorical_column_with_vocabulary_file("a", tmp_path / "none")
    with pytest.raises(ValueError, match=r"`vocabulary_size` must be at most the number of lines of 'words', 4, got 9"):
        fc.categorical_column_with_vocabulary_file("a", path, 9)
    with pytest.raises(ValueError, match="`vocabulary_file` must hold distinct integers"):
        fc.categorical_column_with_vocabulary_file("a", path, dtype=torch.int64)
    numbers.write_text("")
    with pytest.raises(ValueError, match="at least one line"):
        fc.categorical_column_with_vocabulary_file("a", numbers)


ages = fc.numeric_column("ages")
hashed = fc.categorical_column_with_hash_bucket("h", 5)
BAD_COLUMNS = [
    (lambda: identity("", 3), TypeError, r"`key` must be the name of a feature"),
    (lambda: identity("a", 0), ValueError, r"`num_buckets` must be an int from 1 to \d+, got 0"),
    (lambda: identity("a", 3, 3), ValueError, r"`default_value` must be an id below 3, or None, got 3"),
    (
        lambda: fc.categorical_column_with_hash_bucket("a", 0),
        ValueError,
        r"`hash_bucket_size` must be an int .*, got 0",
    ),
    (lambda: fc.categorical_column_with_hash_bucket("a", 5, "float32"), ValueError, r'`dtype` must be "string" or an'),
    (lambda: fc.categorical_column_with_vocabulary_list("a", []), ValueError, r"`vocabulary_list` must not be empty"),
    (
        lambda: fc.categorical_column_with_vocabulary_list("a", ["x", "x"]),
        ValueError,
        r"twice, got 'x' again at place 1",
    ),
    (lambda: fc.categorical_column_with_vocabulary_list("a", ["x", 1]), TypeError, r"strings alone or integers alone"),
    (lambda: fc.categorical_column_with_vocabulary_list("a", ["x"], "int64"), ValueError, r"`dtype` must be that of"),
    (
        lambda: fc.categorical_column_with_vocabulary_list("a", ["x"], None, 1),
        ValueError,
        r"`default_value` must be the",
    ),
    (
        lambda: fc.categorical_column_with_vocabulary_list("a", ["x"], None, 0, 2),
        ValueError,
        r"must be -1 with `num_oov",
    ),
    (
        lambda: fc.categorical_column_with_vocabulary_list("a", ["x"], None, -1, -2),
        ValueError,
        r"`num_oov_buckets` must",
    ),
    (
        lambda: fc.bucketized_column(ages, [2, 1]),
        ValueError,
        r"`boundaries` must be numbers that increase, got \[2, 1\]",
    ),
    (lambda: fc.bucketized_column(hashed, [1]), TypeError, r"`source_column` must be a numeric_column, got Hashed"),
    (lambda: fc.numeric_column("a", (0,)), ValueError, r"`shape` must be an int of at least 1, got 0"),
    (lambda: fc.numeric_column("a", 2, [1.0, 2.0, 3.0]), ValueError, r"`default_value` must be one number or 2"),
    (lambda: fc.numeric_column("a", dtype="string"), ValueError, r"`dtype` must be a number type"),
    (lambda: fc.crossed_column(["a"], 5), ValueError, r"`keys` must hold at least two keys"),
    (lambda: fc.crossed_column(["a", hashed], 5), ValueError, r"give the name 'h' itself"),
    (lambda: fc.crossed_column(["a", ages], 5), TypeError, r"`keys` must be names of features or categorical"),
    (lambda: fc.weighted_categorical_column(hashed, ""), TypeError, r"`weight_feature_key` must be the name"),
    (lambda: fc.weighted_categorical_column(hashed, "w", "int32"), ValueError, r"`dtype` must be a float type"),
    (lambda: fc.indicator_column(ages), TypeError, r"`categorical_column` must be a categorical column, got NumericC"),
    (lambda: fc.embedding_column(ages, 3), TypeError, r"`categorical_column` must be a categorical column"),
    (lambda: fc.embedding_column(hashed, 0), ValueError, r"`dimension` must be an int of at least 1, got 0"),
    (
        lambda: fc.embedding_column(hashed, 3, "max"),
        ValueError,
        r"`combiner` must be one of mean, sqrtn, sum, got 'max'",
    ),
    (lambda: fc.embedding_column(hashed, 3, max_norm=-1), ValueError, r"`max_norm` must be a number of at least 0"),
    (lambda: fc.embedding_column(hashed, 3, ckpt_to_load_from="x"), ValueError, r"must be given together"),
    (
        lambda: fc.embedding_column(hashed, 3, do_fusion="v2"),
        ValueError,
        r"`do_fusion` must be True or False, got 'v2'",
    ),
    (lambda: fc.shared_embedding_columns([], 3), ValueError, r"must hold at least one column"),
    (lambda: fc.shared_embedding_columns([identity("a", 3), hashed], 3), ValueError, r"one number of buckets .*'h': 5"),
    (lambda: fc.InputLayer([]), ValueError, r"`columns` must hold at least one column, got none"),
    (lambda: fc.InputLayer({"a": 1}), TypeError, r"features are given when the layer is called"),
    (lambda: fc.InputLayer(["a"]), TypeError, r"`columns` must hold feature columns, got str"),
    (lambda: fc.InputLayer([hashed]), TypeError, r"wrap it in embedding_column or indicator_column"),
    (lambda: fc.InputLayer([ages, ages]), ValueError, r"`columns` must have different names, got 'ages' twice"),
    (
        lambda: fc.InputLayer([fc.embedding_column(fc.sequence_categorical_column_with_hash_bucket("s", 5), 2)]),
        ValueError,
        r"embedding_column of 's' must not be of a sequence column .* or SequenceInputLayer in place of InputLayer",
    ),
    (lambda: fc.SequenceInputLayer([ages]), TypeError, r"must be embedding columns of sequence columns, got 'ages'"),
    (lambda: fc.LinearModel([ages], units=0), ValueError, r"`units` must be an int of at least 1"),
    (lambda: fc.linear_model([ages], sparse_combiner="max"), ValueError, r"`sparse_combiner` must be one of"),
    (lambda: fc.linear_model({"ages": [1.0]}, [ages]), (TypeError, ValueError), r"`(columns|units)`"),
]


@pytest.mark.parametrize("number", range(len(BAD_COLUMNS)))
def test_bad_columns_are_refused(number):
    make, error, message = BAD_COLUMNS[number]
    with pytest.raises(error, match=message):
        make()


def embedded(column):
    return [fc.embedding_column(column, 2)]


BAD_BATCHES = [
    ([ages], {"age": [1.0]}, ValueError, r"must hold 'ages', which column 'ages' reads, got only \['age'\]"),
    ([ages], [1.0], TypeError, r"`features` must be a dict of features by key, got list"),
    ([ages], {"ages": ["x"]}, TypeError, r"'ages' must hold numbers for numeric_column, got strings"),
    ([ages], {"ages": [[1.0, 2.0]]}, ValueError, r"must hold 1 numbers for each example, as `shape=\(1,\)` says"),
    ([ages], {"ages": [[1.0, 2.0], []]}, ValueError, r"must hold 1 numbers for each example"),
    ([ages], {"ages": torch.zeros(2, 3)}, ValueError, r"got an example of shape \(3,\): give a dense tensor \[B, 1\]"),
    (embedded(identity("a", 3)), {"a": [[0, 3]]}, IndexError, r"ids below `num_buckets=3`, got 3 at position 1: raise"),
    (embedded(identity("a", 3)), {"a": [["x"]]}, TypeError, r"'a' must hold integers, as the `dtype` of column 'a'"),
    (embedded(identity("a", 3)), {"a": [0.5]}, TypeError, r"got floats: use numeric_column with bucketized_column"),
    (embedded(hashed), {"h": [1]}, TypeError, r"'h' must hold strings, .* got integers: convert the feature, or make"),
    (embedded(hashed), {"h": 3}, TypeError, r"'h' must be a batch of values, got int: give a tensor, Bags"),
    (embedded(hashed), {"h": torch.tensor(3)}, ValueError, r"must have a batch dimension"),
    (embedded(hashed), {"h": torch.zeros(3, dtype=torch.bool)}, TypeError, r"integers or floats, got torch.bool"),
    (embedded(hashed), {"h": [["x"], 3]}, ValueError, r"all lists or all values, got a mixture"),
    (embedded(hashed), {"h": ["x", 3]}, TypeError, r"must hold strings alone, got a mixture"),
    (embedded(hashed), {"h": [[["x"]]]}, ValueError, r"got a deeper one: flatten it"),
    (embedded(hashed), {"h": [True]}, TypeError, r"must hold integers, floats or strings, got bool"),
    (embedded(hashed), {"h": np.array([["x"]])[..., None]}, ValueError, r"must be \[batch\] or \[batch, places\]"),
    (embedded(hashed), {"h": pa.array([["x", None]])}, ValueError, r"must hold no nulls inside of lists, got 1"),
    (embedded(hashed), {"h": pa.array([True])}, TypeError, r"got bool: cast it"),
    (
        embedded(identity("a", 3)),
        {"a": SparseIds(torch.tensor([[0, 0, 0]]), torch.tensor([1]), (1, 1, 1))},
        ValueError,
        r"must have a `dense_shape` of two sizes",
    ),
    ([*embedded(hashed), ages], {"h": ["x"], "ages": [1.0, 2.0]}, ValueError, r"one batch size, got {.*'ages': 2}"),
    (embedded(fc.crossed_column(["a", "b"], 5)), {"a": [1], "b": [1, 2]}, ValueError, r"column 'a_X_b' must have one"),
    (embedded(fc.crossed_column(["a", "b"], 5)), {"a": [1], "b": [0.5]}, TypeError, r"got floats: cross a bucketized"),
    (
        embedded(fc.weighted_categorical_column(identity("a", 3), "w")),
        {"a": [[1, 2]], "w": [[1.0]]},
        ValueError,
        r"'w' must hold one weight for each id of column 'a', got \[1\] weights for \[2\] ids a bag",
    ),
    (
        embedded(fc.weighted_categorical_column(identity("a", 3), "w")),
        {"a": Bags.from_lists([[1]], [[1.0]]), "w": [[1.0]]},
        ValueError,
        r"must come without weights, got some of their own",
    ),
    (
        [fc.numeric_column("ages", normalizer_fn=lambda x: x.sum())],
        {"ages": [1.0, 2.0]},
        ValueError,
        r"`normalizer_fn` of column 'ages' must return a tensor of its argument's shape",
    ),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BAD_BATCHES)))
def test_bad_batches_are_refused(number):
    columns, batch, error, message = BAD_BATCHES[number]
    with pytest.raises(error, match=message):
        fc.InputLayer(columns)(batch)


def test_sequences_must_fit():
    sequence = [fc.embedding_column(fc.sequence_categorical_column_with_identity(key, 5), 2) for key in "ab"]
    layer = fc.SequenceInputLayer(sequence)
    with pytest.raises(ValueError, match="must have the same lengths in every column, got others in 'b_embedding'"):
        layer({"a": [[1, 2]], "b": [[1]]})
    with pytest.raises(ValueError, match="must have no weights"):
        layer({"a": Bags.from_lists([[1]], [[1.0]]), "b": [[1]]})
