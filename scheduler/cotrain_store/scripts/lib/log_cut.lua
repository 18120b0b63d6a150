-- log_cut: delete ops that a registered file covers, and release their bodies.
-- needs: spool_refs
-- `log` names the keys: log, ops, bodies, digests, refs. Digests outlive their ops by `kept`.
local function cut_log(log, first, last, kept)
  for seq = first, last do
    local envelope = redis.call('HGET', log.ops, seq)
    if envelope then
      release_body(log.refs, envelope)
    end
    redis.call('HDEL', log.ops, seq)
    redis.call('HDEL', log.bodies, seq)
    redis.call('HDEL', log.log, 'step:' .. seq, 'rewind:' .. seq)
    local old = seq - kept
    local key = redis.call('HGET', log.digests, 'rider:' .. old)
    redis.call('HDEL', log.digests, old)
    if key then
      redis.call('HDEL', log.digests, 'rider:' .. old, 'key:' .. key)
    end
  end
end
