-- log_cut: delete ops that a registered file covers, and release their bodies.
-- needs: spool_refs
-- Digests outlive their ops by `kept`.
local function cut_log(prefix, run, first, last, kept)
  local ops, digests = prefix .. 'ops:' .. run, prefix .. 'digests:' .. run
  for seq = first, last do
    local envelope = redis.call('HGET', ops, seq)
    if envelope then
      release_body(envelope)
    end
    redis.call('HDEL', ops, seq)
    redis.call('HDEL', prefix .. 'bodies:' .. run, seq)
    redis.call('HDEL', prefix .. 'log:' .. run, 'step:' .. seq, 'rewind:' .. seq)
    local old = seq - kept
    local key = redis.call('HGET', digests, 'rider:' .. old)
    redis.call('HDEL', digests, old)
    if key then
      redis.call('HDEL', digests, 'rider:' .. old, 'key:' .. key)
    end
  end
end
