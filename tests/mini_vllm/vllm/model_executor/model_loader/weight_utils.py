from safetensors import safe_open


def safetensors_weights_iterator(files, use_tqdm):
    for file in sorted(files):
        with safe_open(file, framework="pt") as f:
            for name in f.keys():  # noqa: SIM118
                yield name, f.get_tensor(name)


def fastsafetensors_weights_iterator(files, use_tqdm):
    raise RuntimeError("no GPU")


def default_weight_loader(param, loaded_weight):
    assert param.size() == loaded_weight.size(), (
        f"Attempted to load weight ({loaded_weight.size()}) into parameter ({param.size()})"
    )
    param.data.copy_(loaded_weight)
