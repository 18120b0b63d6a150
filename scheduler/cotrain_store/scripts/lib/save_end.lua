-- save_end: what every end of a named save does, once: its client gets its result, it is unstored no more,
-- and a run that it was the last of ends.
-- needs: run_close
-- `notify` is where results are published; `closing` what other requests of that run resolve to.
local function end_save(weights, ref, record, prefix, result, ttl_ms, notify, closing)
  local resolved = { ref }
  put_result(ref, result, ttl_ms)
  redis.call('SREM', 'cotrain:tenant:' .. record.tenant .. ':owed', ref)
  if redis.call('HGET', weights, 'last') == '1' then
    local ended = close_run(prefix, record.run, record.tenant, 'closed', closing, ttl_ms)
    for _, request in ipairs(ended or {}) do
      resolved[#resolved + 1] = request
    end
  end
  redis.call('HDEL', weights, 'checkpoint', 'result', 'ttl', 'last')
  redis.call('PUBLISH', notify, table.concat(resolved, '\n'))
end
