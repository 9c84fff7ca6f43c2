"""What the words of a pipeline's devices mean for the head: signs of life, errors that name who is to blame, features of the right shape."""

from __future__ import annotations

from flowspec.core import limits
from flowspec.core.cluster_messages import Error, Pong, Ready
from flowspec.core.membership import Heard, Progressed
from flowspec.core.messages import Message, Verified
from flowspec.core.precision import ACTIVATIONS
from flowspec.errors import BrokenError, ClusterError, PeerError
from flowspec.plan.placement import ClusterPlan, StagePlan
from flowspec.wire.codec import Tensor


def described(stage: StagePlan) -> str:
    """A stage's device, for messages to people."""
    return f"device {stage.name} at {stage.address}"


def word_of(device: str, message: Message) -> Heard | Progressed:
    """What a message says about the device that sent it, whatever else it says."""
    if isinstance(message, Pong):
        return Heard(device=device, running_s=message.running_s, queued=message.queued, done=message.done)
    return Progressed(device=device, is_ready=isinstance(message, Ready))


def error_of(plan: ClusterPlan, index: int, error: Error) -> ClusterError:
    """What the error of stage `index` means for the pipeline."""
    stage = plan.stages[index]
    text = f"{described(stage)}: {error.text}"
    if not error.cause:
        return ClusterError(text)
    if error.cause == "next" and index + 1 < len(plan.stages):
        return BrokenError(text, plan.stages[index + 1].name, f"lost by {stage.name}")
    device = stage.name if error.cause in ("part", "gone") else ""
    return BrokenError(text, device, error.text, is_refusal=error.cause == "part")


def check_room(plan: ClusterPlan, index: int, ready: Ready) -> None:
    """Raises `BrokenError` for a stage that has no room for even one conversation with a full context, which its daemon should have refused."""
    needed = plan.context + limits.TREE_NODES_MAX if plan.drafting is None else 0  # a drafter is not asked about what it has no room for
    if ready.cache_slots < needed:
        stage = plan.stages[index]
        why = f"expected room for {needed} cache slots, got {ready.cache_slots}; give it fewer layers, or use a smaller --context"
        raise BrokenError(f"{described(stage)}: {why}", stage.name, why, is_refusal=True)


def check_features(plan: ClusterPlan, verified: Verified, features: Tensor | None) -> None:
    """Raises `PeerError` for features that are not those that the drafter asked for."""
    if not verified.row_count or not plan.captures or not plan.hidden_size:
        return
    expected = (verified.row_count, len(plan.captures) * plan.hidden_size, ACTIVATIONS[plan.dtype])
    found = None if features is None else (features.rows, features.width, features.dtype)
    if found != expected:
        raise PeerError(f"expected features of {expected} with segment {verified.segment}, got {found}")
