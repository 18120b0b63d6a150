-- pool_leave: remove a worker from its pool. Sample requests that waited for it wait for any worker, or for its successor
-- if that alone has their weights. The successor also gets the runs that the worker must drop.
local function leave_pool(prefix, worker, successor, any_worker)
  redis.call('SREM', prefix .. 'workers', worker)
  for _, tenant in ipairs(redis.call('SMEMBERS', prefix .. 'tenants')) do
    local waiting = prefix .. 'waiting:' .. worker .. ':' .. tenant
    local request = redis.call('RPOP', waiting)
    while request do
      local sample = 'cotrain:sample:' .. request
      local weights = redis.call('HGET', sample, 'weights')
      local is_unstored = redis.call('HGET', 'cotrain:weights:' .. weights, 'digest') == ''
      local queue = is_unstored and successor or any_worker
      redis.call('HSET', sample, 'lane', queue)
      redis.call('LPUSH', prefix .. 'waiting:' .. queue .. ':' .. tenant, request)
      request = redis.call('RPOP', waiting)
    end
  end
  local drops, its_drops = prefix .. 'drops:' .. successor, prefix .. 'drops:' .. worker
  redis.call('SUNIONSTORE', drops, drops, its_drops)
  redis.call('DEL', its_drops)
end
