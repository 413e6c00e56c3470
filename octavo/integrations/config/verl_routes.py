"""Router replay under verl's and slime's names."""

from octavo.integrations.config.reader import Reader
from octavo.integrations.config.verl_keys import REPLAYS, ROUTES


def read_router_replay(reader: Reader) -> None:
    """verl's R3 takes two keys: the rollout returns its routes, and the actor replays them."""
    are_returned = reader.take(ROUTES, bool, False)
    modes = {name: reader.take(name, str, "disabled", ("disabled", "R3")) for name in REPLAYS}
    replays = [name for name, mode in modes.items() if mode == "R3"]
    if are_returned and not replays:
        reader.refuse(ROUTES, f"routes are not replayed without {REPLAYS[0]}=R3; give that too")
    elif replays and not are_returned:
        reader.refuse(replays[0], f"R3 needs the routes of the rollout; give {ROUTES}=true too")
    elif reader.is_given(ROUTES, *REPLAYS):
        put_router_replay(reader, are_returned, ROUTES, *(replays or REPLAYS))


def put_router_replay(reader: Reader, is_wanted: bool, *names: str) -> None:
    """Set octavo's router_replay from keys that mean it; with exact = true both sides route alike anyway."""
    if is_wanted and reader.held("exact"):
        given = ", ".join(name for name in names if reader.is_given(name))
        reader.notes.append(f"{given}: exact = true, so trainer and sampler choose the same experts without a replay")
        return
    reader.put("router_replay", is_wanted, *names)
