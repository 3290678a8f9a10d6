"""The reference set: the data set D that an estimator averages over, whole or in shards."""

from lit_knn.reference.images import to_model_space
from lit_knn.reference.reference_set import ReferenceSet
from lit_knn.reference.sharded import ShardedReferenceSet
from lit_knn.reference.shards import shard_rows

__all__ = ["ReferenceSet", "ShardedReferenceSet", "shard_rows", "to_model_space"]
