"""Damage to a checkpoint file, for tests: each kind takes the bytes of a file and a random generator."""

import io
from collections.abc import Callable
from random import Random

import torch

PAGE = 4096


def flip_bit(data: bytes, random: Random) -> bytes:
    position = random.randrange(len(data))
    return data[:position] + bytes([data[position] ^ 1 << random.randrange(8)]) + data[position + 1 :]


def flip_bit_of_pickle(data: bytes, random: Random) -> bytes:
    """Where the structure of the content is: the first record of the archive."""
    start, end = data.index(b"data.pkl"), data.index(b"PK\x07\x08")
    position = random.randrange(start, end)
    return data[:position] + bytes([data[position] ^ 1 << random.randrange(8)]) + data[position + 1 :]


def flip_bit_of_directory(data: bytes, random: Random) -> bytes:
    """Where names, sizes and positions of the records are, at the end of the archive."""
    position = random.randrange(data.index(b"PK\x01\x02"), len(data))
    return data[:position] + bytes([data[position] ^ 1 << random.randrange(8)]) + data[position + 1 :]


def truncate(data: bytes, random: Random) -> bytes:
    return data[: random.randrange(len(data))]


def zero_page(data: bytes, random: Random) -> bytes:
    start = PAGE * random.randrange(len(data) // PAGE)
    return data[:start] + bytes(PAGE) + data[start + PAGE :]


def swap_pages(data: bytes, random: Random) -> bytes:
    first, second = sorted(PAGE * i for i in random.sample(range(len(data) // PAGE), 2))
    pages = data[first : first + PAGE], data[second : second + PAGE]
    return data[:first] + pages[1] + data[first + PAGE : second] + pages[0] + data[second + PAGE :]


def repeat_tail(data: bytes, random: Random) -> bytes:
    return data + data[-random.randrange(1, 2 * PAGE) :]


def change_number(content: dict, random: Random) -> None:
    content[random.choice(["epoch", "global_step"])] += 1


def change_setting(content: dict, random: Random) -> None:
    content["optimizer_states"][0]["param_groups"][0]["lr"] *= 1 + 2**-52


def change_metadata(content: dict, random: Random) -> None:
    content["tril"]["data"]["name"] += " "


def change_element(content: dict, random: Random) -> None:
    tensor = random.choice(list(content["state_dict"].values()))
    tensor.view(-1)[random.randrange(tensor.numel())] += 1e-3


def change_moment(content: dict, random: Random) -> None:
    content["optimizer_states"][0]["state"][random.randrange(4)]["exp_avg"].view(-1)[0] += 1e-3


def change_dtype(content: dict, random: Random) -> None:
    name = random.choice(list(content["state_dict"]))
    content["state_dict"][name] = content["state_dict"][name].double()


def change_shape(content: dict, random: Random) -> None:
    content["optimizer_states"][0]["state"][0]["exp_avg"].t_()


def swap_names(content: dict, random: Random) -> None:
    state = content["state_dict"]
    names = [name for name in state if name.endswith(("k_proj.weight", "v_proj.weight"))]  # of the same shape
    first, second = random.sample(names, 2)
    state[first], state[second] = state[second], state[first]


def remove_moment(content: dict, random: Random) -> None:
    del content["optimizer_states"][0]["state"][random.randrange(4)]["exp_avg"]


def lose_digests(content: dict, random: Random) -> None:
    content["digest?"] = content.pop("digests")


def edited(change: Callable[[dict, Random], None]) -> Callable[[bytes, Random], bytes]:
    """The same file with another value in it, as a whole archive with its CRC-32."""

    def edit(data: bytes, random: Random) -> bytes:
        content, file = torch.load(io.BytesIO(data), weights_only=True), io.BytesIO()
        change(content, random)
        torch.save(content, file)
        return file.getvalue()

    edit.__name__ = change.__name__
    return edit


BYTES = [flip_bit, flip_bit_of_pickle, flip_bit_of_directory, truncate, zero_page, swap_pages, repeat_tail]
VALUES = [change_number, change_setting, change_metadata, change_element, change_moment, change_dtype, change_shape]
STRUCTURE = [swap_names, remove_moment, lose_digests]
KINDS = [*BYTES, *map(edited, VALUES + STRUCTURE)]
