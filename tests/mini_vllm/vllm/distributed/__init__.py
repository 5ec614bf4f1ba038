import torch.distributed as dist

WORLD = {"tp": 1}


def init_distributed_environment(world_size, rank, method, local_rank, backend):
    assert dist.is_initialized()
    assert dist.get_world_size() == world_size
    dist.new_group(list(range(world_size)), backend="gloo")


def initialize_model_parallel(tp, pp):
    WORLD["tp"] = tp


def destroy_model_parallel():
    WORLD["tp"] = 1


def destroy_distributed_environment():
    dist.destroy_process_group()
