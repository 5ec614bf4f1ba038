from dataclasses import dataclass, field


@dataclass
class WeightsMapper:
    """Names through rules, as a release does it: stacked rules, then prefixes."""

    orig_to_new_substr: dict = field(default_factory=dict)
    orig_to_new_stacked: dict = field(default_factory=dict)
    orig_to_new_prefix: dict = field(default_factory=dict)

    def _map_name_with_shard(self, key):
        for substr, new in self.orig_to_new_substr.items():
            if substr in key:
                if new is None:
                    return None
                key = key.replace(substr, new, 1)
        shard = None
        for substr, (new, shard_id) in self.orig_to_new_stacked.items():
            if substr in key:
                key, shard = key.replace(substr, new, 1), shard_id
        for prefix, new in self.orig_to_new_prefix.items():
            if key.startswith(prefix):
                if new is None:
                    return None
                key = key.replace(prefix, new, 1)
        return key, shard

    def apply(self, weights):
        for name, data in weights:
            mapped = self._map_name_with_shard(name)
            if mapped is not None:
                data.shard_id = mapped[1]
                yield mapped[0], data
