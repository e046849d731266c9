"""Decides which bucket moves where, and when. It moves no byte itself: `mover` does, or a simulator's clock.

    need(key)          the engine computes with it from now on: load it, if it is not on the device, and wait
    hint(key)          it will be needed soon: begin to load it
    end_use(key, …)    it is computed with no more; it may stay on the device as long as nothing else needs the room
    drop(key)          nobody needs its contents again

A bucket's contents are on the device, in host memory, on the disk, or on several of them as long as they are the same:
what was only read need not be written again. Where room is needed on the device, the bucket goes that is needed
furthest in the future (Belady), or was used longest ago (LRU, and as long as no order is known). It goes to host
memory, from where one that is needed later still goes to the disk; or to the disk itself, if all there come sooner.

Look-ahead. A bucket on a lower tier is loaded when the time until it is needed is that of its way, by the rates
measured so far, with some to spare: no sooner. And only into room from which Belady's rule would evict at the time of
the access, too: a sooner load must not cost another one later (Cao, Felten, Karlin & Li 1995, "A study of integrated
prefetching and caching strategies": do no harm). Over a slow link it pays to load one bucket more while another leaves:
`_is_late`.
"""

from ...common.accesses import AccessRecording
from ..errors import StoreError
from .bucket_moves import DEVICE, DISK, HOST, Counts, Move, TieredBucket
from .tier import Tier

SPARE = 1.5  # of the time that a load takes


class TierPlacement:
    """Decides which bucket moves, and lets a `mover` move it: `now()`, `start(move)`, `wait(move)`,
    `seconds(link, nbytes)`, `reserve(bucket)`, `free(bucket, tier)`.

    `capacities`: {tier: bytes}, no disk if it has none. `device`: None for as much as is computed with at a time.
    """

    def __init__(self, mover, device, host, disk, rule="belady"):
        self.mover, self.rule, self.recording, self.counts = mover, rule, AccessRecording(), Counts()
        self.tiers = {DEVICE: Tier(DEVICE, device or 0), HOST: Tier(HOST, host)}
        self.grows, self.has_disk, self.disk_bytes = device is None, disk, 0
        self.buckets, self._ended, self._entering, self._loading = {}, mover.now(), [], None

    # --- what an engine asks -----------------------------------------------------------------------------------------

    def need(self, key):
        """Return when a bucket is on the device. No-op for one that is not known."""
        bucket = self.buckets.get(key)
        if bucket is None or bucket.in_use:
            return
        begun = self._note(key)
        self.counts.hits += DEVICE in bucket.where and bucket.loaded  # a prefetched one had to move: no hit
        if DEVICE not in bucket.where:
            self._load(bucket, self._victims(bucket.nbytes))
        bucket.in_use = bucket.loaded = True
        if move := bucket.coming.pop(DEVICE, None):
            self.mover.wait(move)
        self._waited(begun)
        self._look_ahead()

    def hint(self, key):
        """Begin to load a bucket, if that costs none that is needed sooner. Where nothing is known, it does."""
        bucket = self.buckets.get(key)
        if bucket is not None and DEVICE not in bucket.where:
            victims = self._victims(bucket.nbytes, self.recording.next_use(key), ask=True)
            if victims is not None:
                self._load(bucket, victims)

    def end_use(self, key, nbytes, changed=True, tensors=None):
        """Note that a bucket, with all its bytes on the device, is computed with no more."""
        begun, bucket = self.mover.now(), self.buckets.get(key)
        if bucket is None or bucket.nbytes != nbytes:
            self.drop(key)  # another size: what is known of it is of other tensors
            self._check_fits(nbytes)
            begun = self._note(key)
            bucket = self.buckets[key] = TieredBucket(key, nbytes, tensors, {DEVICE})
            try:
                self._enter(bucket)
            except StoreError:  # nothing of it has moved: it can be put again
                del self.buckets[key]
                raise
        elif changed:
            self._forget_copies(bucket)
        bucket.tensors, bucket.in_use = tensors, False
        self._ended = self.mover.now() if self._ended is None else self._ended + self.mover.now() - begun

    def drop(self, key):
        """Forget a bucket."""
        bucket = self.buckets.pop(key, None)
        if bucket is None:
            return
        for tier in sorted(bucket.where):
            if move := bucket.coming.get(tier):
                self.mover.wait(move)
        if DEVICE in bucket.where:
            self.tiers[DEVICE].free(bucket.nbytes)
        self._forget_copies(bucket)

    # --- how ---------------------------------------------------------------------------------------------------------

    def _note(self, key):
        """Record an access; return when it began."""
        begun = self.mover.now()
        self.recording.note(key, begun - self._ended)
        self._ended = begun
        self.counts.accesses += 1
        return begun

    def _waited(self, begun):
        self._ended = self.mover.now()
        if self._ended - begun > 1e-4:
            self.counts.stalls += 1
        self.counts.stalled += self._ended - begun

    def _check_fits(self, nbytes):
        """Raise StoreError for a bucket that is larger than the device: it could leave, and never come back."""
        if nbytes > self.tiers[DEVICE].capacity and not self.grows:
            raise self._too_small([], nbytes)

    def _too_small(self, in_use, nbytes):
        least = sum(each.nbytes for each in in_use) + nbytes
        return StoreError(None, f"device={self.tiers[DEVICE].capacity:,} bytes: {len(in_use)} buckets are computed "
                                f"with and {nbytes:,} bytes are needed beside them; pass at least {least:,}, what "
                                "refimpl.offload.traces.least_device_bytes says, or device=\"auto\"")

    def _enter(self, bucket):
        """Make room for a bucket that somebody else has put on the device."""
        victims = self._victims(bucket.nbytes)
        for victim in victims:
            self._evict(victim)
        after = self.tiers[DEVICE].allocate(bucket.nbytes)
        for move in self._entering:  # one such bucket at a time is beyond the capacity
            self.mover.wait(move)
        self._entering = after

    def _start(self, bucket, source, target, after):
        move = Move(bucket, source, target, bucket.nbytes if source == DEVICE and target == HOST or
                    source == HOST and target == DEVICE else bucket.host_bytes, after)
        self.counts.moved[source, target] = self.counts.moved.get((source, target), 0) + move.nbytes
        bucket.coming[target] = move
        bucket.where.add(target)
        self.mover.start(move)
        return move

    def _load(self, bucket, victims):
        self._loading = bucket
        try:
            for victim in victims:
                self._evict(victim)
        finally:
            self._loading = None
        source = HOST if HOST in bucket.where else DISK
        after = self.tiers[DEVICE].allocate(bucket.nbytes)
        after += [bucket.coming[source]] if source in bucket.coming else []
        bucket.loaded = False  # until somebody uses it
        self._start(bucket, source, DEVICE, after)

    def _evict(self, bucket):
        """Move a bucket off the device; nothing moves if a lower tier has the same."""
        came = bucket.coming.pop(DEVICE, None)
        if bucket.where > {DEVICE}:
            if came is not None:
                self.mover.wait(came)  # its memory must not go while a load writes there
            self.mover.free(bucket, DEVICE)
            self.tiers[DEVICE].free(bucket.nbytes)
        else:
            after = [came] if came else []
            if self._host_room(bucket, after):
                target = HOST
                after += self.tiers[HOST].allocate(bucket.host_bytes)
            else:
                target = DISK
                self._reserve(bucket)
            self.tiers[DEVICE].free(bucket.nbytes, self._start(bucket, DEVICE, target, after))
        bucket.where.discard(DEVICE)

    def _host_room(self, bucket, after, limit=None):
        """Make room in host memory for a bucket, at the cost of those alone that are needed later. False if there are
        too few."""
        host, limit = self.tiers[HOST], self._rank(bucket) if limit is None else limit
        if bucket.host_bytes > host.capacity:
            return False
        while host.room < bucket.host_bytes:
            # not the one that is being loaded: it is read from there
            there = [each for each in self.buckets.values() if HOST in each.where and each is not self._loading]
            twice = [each for each in there if DEVICE in each.where]  # to lose such a copy costs no write
            victim = max(twice or there, key=self._rank, default=None)
            if victim is None or not twice and (self._rank(victim) <= limit or not self.has_disk):
                return False
            self._leave_host(victim)
        return True

    def _leave_host(self, bucket):
        """Give a bucket's host memory back, and write it to the disk if nobody else has it."""
        if bucket.where == {HOST}:
            self._reserve(bucket)
            came = bucket.coming.get(HOST)
            move = self._start(bucket, HOST, DISK, [came] if came else [])
        else:
            move = next((bucket.coming[tier] for tier in (DEVICE, DISK) if tier in bucket.coming), None)
            self.mover.free(bucket, HOST)
        bucket.where.discard(HOST)
        bucket.coming.pop(HOST, None)
        self.tiers[HOST].free(bucket.host_bytes, move)

    def _reserve(self, bucket):
        if not self.has_disk:
            total = sum(each.host_bytes for each in self.buckets.values())
            device, host = self.tiers[DEVICE].capacity, self.tiers[HOST].capacity
            raise StoreError(None, f"{total:,} bytes do not fit into {device:,} on the device and {host:,} in host "
                                   f"memory: pass at least host={max(total - device, 0) + bucket.host_bytes:,}, or a "
                                   "folder for a disk")
        self.mover.reserve(bucket)

    def _forget_copies(self, bucket):
        if HOST in bucket.where:
            move = bucket.coming.pop(HOST, None)
            self.mover.free(bucket, HOST)
            self.tiers[HOST].free(bucket.host_bytes, move)
        bucket.where &= {DEVICE}
        bucket.coming.pop(DISK, None)

    def _rank(self, bucket, after=-1):
        """Return a number that is higher the sooner a bucket should go."""
        if self.rule == "belady" and bool(self.recording.step):
            return self.recording.next_use(bucket.key, after)
        return self.recording.last_use(bucket.key)

    def _victims(self, nbytes, limit=None, ask=False):
        """Return the buckets whose eviction makes room for `nbytes`, those first that should go first. `limit`: none
        that is needed before. If they are too few: None where one only asks, or else StoreError."""
        device, found = self.tiers[DEVICE], []
        missing = nbytes - device.room
        if missing > 0:
            free = [each for each in self.buckets.values() if DEVICE in each.where and not each.in_use]
            free.sort(key=lambda each: (each.loaded, self._rank(each)))  # prefetched and not yet used: last to go
            while missing > 0 and free:
                victim = free.pop()
                if ask and (not victim.loaded or self._known and self._rank(victim) <= limit):
                    return None
                found.append(victim)
                missing -= victim.nbytes
        if missing > 0:
            if ask:
                return None
            in_use = [each for each in self.buckets.values() if each.in_use]
            if not self.grows:
                raise self._too_small(in_use, nbytes)
            device.grow(missing)
        return found

    @property
    def _known(self):
        return self.rule == "belady" and bool(self.recording.step)

    def _look_ahead(self):
        """Begin the loads that should begin by now."""
        if not self._known:
            return
        backlog = 0.0
        for distance, key, seconds in self.recording.coming():
            bucket = self.buckets.get(key)
            if bucket is None or DEVICE in bucket.where:
                continue
            link = "in" if HOST in bucket.where else "disk"
            way = self.mover.seconds(link, bucket.host_bytes)
            backlog += way
            # not yet: a load that comes too early takes the room of buckets that are needed sooner
            if distance and seconds > SPARE * backlog + self.mover.backlog(link):
                return
            victims = self._victims(bucket.nbytes, distance, ask=True)
            if victims is None or (distance and self._harms(victims, distance) and not self._is_late(bucket, way)):
                return
            self._load(bucket, victims)

    def _is_late(self, bucket, way):
        """Tell whether a bucket should come early even if that costs another load: one must leave before it comes, both
        take longer than the computation of an access, and not more than its own bytes are on their way already. So one
        leaves while another comes."""
        *_, (last, _, seconds) = self.recording.coming()
        on_the_way = sum(each.nbytes for each in self.buckets.values() if DEVICE in each.where and not each.loaded)
        return on_the_way <= bucket.nbytes and (
            self.mover.seconds("out", bucket.nbytes) + way > seconds / (last + 1))

    def _harms(self, victims, distance):
        """Tell whether Belady's rule would evict others than these at an access that is so far away: one that is used
        before it, and then not for longer than they."""
        if not victims:
            return False
        soonest = min(self._rank(victim) for victim in victims)
        between = {key for d, key, _ in self.recording.coming() if d < distance}
        between |= {bucket.key for bucket in self.buckets.values() if bucket.in_use}
        return any(self.recording.next_use(key, distance) > soonest for key in between)
