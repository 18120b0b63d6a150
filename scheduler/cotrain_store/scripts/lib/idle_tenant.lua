-- idle_tenant: remove a tenant without pending or running work from its pool's list, and delete its counters, which
-- are 0 then. The cost of reading the list therefore depends on active tenants only.
local function delete_zeros(key)
  for _, value in ipairs(redis.call('HVALS', key)) do
    if tonumber(value) ~= 0 then
      return
    end
  end
  redis.call('DEL', key)
end

local function remove_if_idle(prefix, tenant)
  local queue, load = prefix .. 'queue:' .. tenant, prefix .. 'samples:' .. tenant
  local samples = redis.call('HMGET', load, 'waiting', 'running')
  if tonumber(redis.call('HGET', queue, 'ops') or 0) <= 0
    and tonumber(samples[1] or 0) + tonumber(samples[2] or 0) <= 0 then
    redis.call('SREM', prefix .. 'tenants', tenant)
    delete_zeros(queue)
    delete_zeros(load)
  end
end
